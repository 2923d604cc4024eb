"""From the configuration to the rules of models: aliases, limits and classes of priority, and second tries."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.configmodels import ModelConfig, Priority
from gateway.core.hedging import Hedge
from gateway.core.models import Rule, Target
from gateway.core.priority import Classes


def classes_of(priority: Priority) -> Classes:
    return Classes(priority.classes, priority.default, priority.header)


def model_rules(models: Mapping[str, ModelConfig], priority: Priority) -> dict[str, Rule]:
    classes = classes_of(priority)
    return {
        name: Rule(
            tuple(Target(target.model, target.weight, target.fallback) for target in one.route_to or ()),
            one.in_flight,
            None if one.priority is None else classes.rank_of(one.priority),
        )
        for name, one in models.items()
    }


def second_tries(models: Mapping[str, ModelConfig]) -> bool:
    """Whether a model asks for some: then a body is looked into, for its model, and held as far as it can be sent again."""
    return any(model.hedge is not None or model.migrate is not None for model in models.values())


def hedges(models: Mapping[str, ModelConfig]) -> dict[str, Hedge]:
    rules = {name: model.hedge for name, model in models.items()}
    return {name: Hedge(rule.after, rule.unstreamed) for name, rule in rules.items() if rule is not None}
