"""Models and classes of priority as they are written in the configuration: `models` and `limits.priority`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec

from gateway.configbackends import BackendConfig, Clash, Section
from gateway.configfile import OneOrMany, describe, join, nearest
from gateway.confighedging import HedgeConfig, MigrateConfig
from gateway.configvalues import ClassName, Count, FieldName, ModelName, whole

CLASSES_MOST = 16
NAME_MOST = 256


class RouteTo(Section, frozen=True):
    """A model that an alias stands for."""

    model: ModelName
    weight: Annotated[int, whole(1, 65535)] = 1
    fallback: bool = False


class ModelConfig(Section, frozen=True):
    route_to: Annotated[list[RouteTo], OneOrMany("a mapping of model, weight and fallback, or a list of them")] | None = None
    in_flight: Count | None = None
    priority: ClassName | None = None
    hedge: HedgeConfig | None = None
    migrate: MigrateConfig | None = None
    rewrite_response: bool = False


class Priority(Section, frozen=True):
    classes: list[ClassName] = msgspec.field(default_factory=lambda: ["high", "normal", "low"])
    default: ClassName = "normal"
    header: FieldName | None = None


def priority_clashes(priority: Priority) -> Iterator[Clash]:
    classes = priority.classes
    if not 0 < len(classes) <= CLASSES_MOST or len(set(classes)) != len(classes):
        yield (
            "limits.priority.classes",
            f"found {describe(classes)}",
            f"1 to {CLASSES_MOST} names, the highest first, each once",
        )
    elif priority.default not in classes:
        yield "limits.priority.default", f"found {priority.default}", _of_classes(priority.default, classes)


def _of_classes(word: str, classes: list[str]) -> str:
    return f"one of limits.priority.classes: {', '.join(classes)}{nearest(word, classes)}"


def model_clashes(models: Mapping[str, ModelConfig], classes: list[str]) -> Iterator[Clash]:
    for name, one in models.items():
        path = join("models", name)
        if not 0 < len(name) <= NAME_MOST or not name.isprintable():
            yield path, f"found a name of {len(name)} characters", f"1 to {NAME_MOST} printable characters"
        if one.priority is not None and one.priority not in classes:
            yield f"{path}.priority", f"found {one.priority}", _of_classes(one.priority, classes)
        targets = one.route_to or ()
        if one.rewrite_response and not targets:
            yield f"{path}.rewrite_response", "found true for a name that is no alias", "a route_to beside it"
        if targets and all(target.fallback for target in targets):
            yield f"{path}.route_to", "found nothing but fallbacks", "a target without fallback: true, for them to stand in for"
        twice = [model for model, count in Counter(target.model for target in targets).items() if count > 1]
        if twice:
            yield f"{path}.route_to", f"found {twice[0]} twice", "each model once"
        for index, target in enumerate(targets):
            other = models.get(target.model)
            if target.model != name and other is not None and other.route_to:
                expected = "a model as backends call it: aliases do not lead to aliases"
                yield f"{path}.route_to[{index}].model", f"found the alias {target.model}", expected


def unserved_clashes(models: Mapping[str, ModelConfig], backends: list[BackendConfig]) -> Iterator[Clash]:
    """Where all that is served is written down, too."""
    served = {model for backend in backends for model in backend.models or ()}
    for name, one in models.items():
        for index, target in enumerate(one.route_to or ()):
            if target.model not in served:
                expected = "a model that is among some backend's models" + nearest(target.model, sorted(served))
                yield f"{join('models', name)}.route_to[{index}].model", f"found {target.model}, which nobody serves", expected
