"""Models: who serves what, as far as backends have said it; aliases; and what is told of names that nobody knows."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.admission import Admission
from gateway.core.backend import Backend, HealthSettings
from gateway.core.breaker import BreakerSettings
from gateway.core.models import COMPARED_MOST, Alias, Models, Rule, Target, Way
from gateway.core.priority import Classes
from gateway.errors import Refusal

NOW = 50.0
Lists = list[tuple[str, ...] | None]


def backends(lists: Lists) -> list[Backend]:
    made = [Backend(f"b{number}", f"http://b{number}") for number in range(len(lists))]
    for backend, models in zip(made, lists, strict=True):
        backend.models = models
    return made


def models(lists: Lists, rules: dict[str, Rule] | None = None) -> Models:
    made = Models()
    made.apply(backends(lists), "least_loaded", 1.25, rules or {})
    return made


def way(found: Way | Alias) -> Way:
    assert isinstance(found, Way)
    return found


def served_by(made: Models, name: str | None) -> set[str]:
    return {backend.name for backend in way(made.find(name)).backends.backends}


def down(backend: Backend) -> None:
    backend.probed(False, HealthSettings(fail=1))


def doubt(backend: Backend, why: str) -> None:
    if why == "busy":
        backend.caution.busy(5, NOW)
    elif why == "silent":
        backend.lease(0, NOW - 100, stream=True)
    else:
        backend.probed(False, HealthSettings())
    reason = backend.caution.reason(NOW)
    assert reason is not None and reason.value == why


LISTS = st.lists(st.one_of(st.none(), st.lists(st.sampled_from("abcd"), max_size=3).map(tuple)), max_size=5)


@given(LISTS, st.sampled_from("abcde"))
def test_who_gets_a_model(lists: Lists, name: str) -> None:
    """By the rules of `core.models`: those who serve it and those who cannot tell; those who have not been heard of yet as
    well, but for models that others serve, where it matters who serves what; nobody, where all have told."""
    made = models(lists)
    if len(lists) < 2:
        assert served_by(made, name) == {f"b{n}" for n in range(len(lists))}
        return
    serving = {f"b{n}" for n, one in enumerate(lists) if one and name in one}
    silent = {f"b{n}" for n, one in enumerate(lists) if one == ()}
    unheard = {f"b{n}" for n, one in enumerate(lists) if one is None}
    if len({frozenset(one) for one in lists if one}) < 2:
        silent, unheard = silent | unheard, set()
    expected = serving | silent if serving else silent | unheard
    if expected:
        assert served_by(made, name) == expected
    else:
        with pytest.raises(Refusal):
            made.find(name)
    assert served_by(made, None) == served_by(made, "") == {f"b{n}" for n in range(len(lists))}


@given(LISTS)
def test_where_models_make_no_difference_they_are_not_asked_for(lists: Lists) -> None:
    """`needed` is false only where every model that is known may go anywhere."""
    made = models(lists)
    anywhere = {f"b{n}" for n in range(len(lists))}
    assert made.needed == (len(lists) > 1 and any(served_by(made, name) != anywhere for name in made.names))


def test_the_same_backends_are_one_pool() -> None:
    """A thousand adapters of one engine share what is known of its turns, and cost nothing."""
    adapters = tuple(f"lora-{n}" for n in range(1000))
    made = models([("a", *adapters), ("a", *adapters), ("b",)])
    assert len({id(way(made.find(name)).backends) for name in ("a", *adapters)}) == 1
    same = models([("a", *adapters)] * 3)
    assert way(same.find("a")).backends is same.whole
    assert not same.needed


def test_a_list_that_changes_leaves_what_waits() -> None:
    """Whoever waits for a model stays in its line, which leads to where that is served now; also to nobody."""
    made = models([("a",), ("b",)])
    line, turns = way(made.find("a")), list[str]()
    one = Admission(1, 9, lambda: 0.0)
    assert one.enter(line)
    one.ticket(line, lambda: turns.append("a"))
    made.whole.backends[1].models = ("a", "b")
    made.learn()
    assert made.find("a") is line
    assert len(line.backends.backends) == 2
    for backend in made.whole.backends:
        backend.models = ("b",)
    made.learn()
    with pytest.raises(Refusal):
        made.find("a")
    assert line.backends.backends == []
    one.release()
    assert turns == ["a"]


# aliases ------------------------------------------------------------------------------------------------------------------

ROUTES = {"x": Rule((Target("a", 3), Target("b", 1), Target("c", 1, True), Target("d", 1, True)))}
EACH: Lists = [("a",), ("b",), ("c",), ("d",)]


def order(made: Models, chance: float) -> list[str | None]:
    found = made.find("x")
    assert isinstance(found, Alias)
    return [one.rewritten for one in found.order(chance, NOW)]


@given(st.floats(0, 1, exclude_max=True))
def test_targets_by_weight_and_then_as_written(chance: float) -> None:
    """The first by weight, then the others, then fallbacks, each once."""
    first = "a" if chance < 0.75 else "b"
    assert order(models(EACH, ROUTES), chance) == [first, "b" if first == "a" else "a", "c", "d"]


def test_who_cannot_be_reached_has_no_share() -> None:
    """Weights are of those that can be reached; where none can be, the order is as always."""
    made = models(EACH, ROUTES)
    down(made.whole.backends[0])
    assert {order(made, n / 100)[0] for n in range(100)} == {"b"}
    made.whole.backends[1].breaker.settings = BreakerSettings(failures=1)
    made.whole.backends[1].failed(NOW)  # ejected: as good as down, while others are not
    assert {tuple(order(made, n / 100)) for n in range(100)} == {("c", "d", "a", "b"), ("c", "d", "b", "a")}
    for backend in made.whole.backends:
        down(backend)
    assert Counter(order(made, n / 100)[0] for n in range(100)) == {"a": 75, "b": 25}


@pytest.mark.parametrize("why", ["busy", "silent", "unproven"])
def test_who_is_passed_over_has_no_share(why: str) -> None:
    """As long as another target leads to somebody; and one that warms up has its share."""
    made = models(EACH, ROUTES)
    doubt(made.whole.backends[0], why)
    assert {tuple(order(made, n / 100)) for n in range(100)} == {("b", "c", "d", "a")}
    down(made.whole.backends[3])
    assert order(made, 0.0) == ["b", "c", "a", "d"]
    for backend in made.whole.backends[1:3]:
        doubt(backend, why)
    assert Counter(order(made, n / 100)[0] for n in range(100)) == {"a": 75, "b": 25}
    made = models(EACH, ROUTES)
    made.whole.backends[0].caution.returned(NOW)
    assert Counter(order(made, n / 100)[0] for n in range(100)) == {"a": 75, "b": 25}


def test_a_target_of_its_own_name_is_not_rewritten() -> None:
    """A model that is tried beside a new one."""
    made = models([("x",), ("x-next",)], {"x": Rule((Target("x", 9), Target("x-next")))})
    assert order(made, 0.0) == [None, "x-next"]


def test_limits_and_classes_of_an_alias_and_of_what_it_stands_for() -> None:
    """Both limits hold; the alias' class goes before the model's."""
    rules = {"x": Rule((Target("a"),), in_flight=5, rank=2), "a": Rule(in_flight=7, rank=0), "y": Rule((Target("a"),))}
    made = models([("a",), ("b",)], rules)
    (by_x,), (by_y,) = (one.order(0.0, NOW) for name in "xy" if isinstance(one := made.find(name), Alias))
    plain = way(made.find("a"))
    assert ([quota.name for quota in by_x.quotas], by_x.rank) == (["x", "a"], 2)
    assert ([quota.name for quota in by_y.quotas], by_y.rank) == (["a"], 0)
    assert plain.quotas[0] is by_x.quotas[1] is by_y.quotas[0]
    made.apply(made.whole.backends, "round_robin", 1.25, {"a": Rule(in_flight=9)})
    assert way(made.find("a")).quotas[0] is plain.quotas[0]
    assert plain.quotas[0].limit == 9


def test_names_of_the_configuration_are_known() -> None:
    """Also while nobody serves them: no backend, rather than no such model; and they are told of."""
    made = models([("a",), ("b",)], {"x": Rule((Target("nobody"),)), "z": Rule(in_flight=1)})
    assert made.unserved() == [("x", "nobody"), ("z", "z")]
    assert served_by(made, "z") == set()
    assert made.names == {"a", "b", "x", "z"}
    assert models([("a",), None], {"x": Rule((Target("nobody"),))}).unserved() == []


# names that nobody knows --------------------------------------------------------------------------------------------------


def test_the_nearest_names() -> None:
    """At most three, the nearest first; where none is near, some that there are."""
    made = models([("llama-3-8b", "llama-3-70b", "qwen"), ("llama-2-7b", "phi")])
    said = made.unknown("lama-3-8b").message
    assert said.startswith("the model 'lama-3-8b' does not exist; the nearest that are served: llama-3-8b, ")
    assert "phi" not in said
    assert made.unknown("zzz").message.endswith("served are llama-2-7b, llama-3-70b, llama-3-8b and 2 more (GET /v1/models)")


def test_the_nearest_name_in_another_case_and_of_very_many() -> None:
    """Names differ in case more often than in letters; and the nearest of a thousand adapters may be the last of them."""
    made = models([("Qwen/Qwen2.5-7B-Instruct", "meta-llama/Llama-3.1-8B"), ("x",)])
    assert "the nearest that are served: meta-llama/Llama-3.1-8B" in made.unknown("LLAMA-3.1-8B").message
    many = models([tuple(f"adapter-{n:04}" for n in range(999)) + ("Zebra-SQL",), ("x",)])
    assert "the nearest that are served: Zebra-SQL" in many.unknown("zebra-sql").message
    assert "adapter-0777" in many.unknown("adaptor-0777").message



def test_an_unknown_name_is_cut() -> None:
    """Neither a client's megabyte nor ten thousand names of ours are compared or repeated."""
    made = models([tuple(f"model-{n}" for n in range(10 * COMPARED_MOST)), ("b",)])
    assert len(made.unknown("model-" + "9" * 1_000_000).message) < 400


# classes ------------------------------------------------------------------------------------------------------------------



@pytest.mark.parametrize(
    ("header", "value", "of_model", "rank"),
    [
        (None, b"high", None, 1), (None, b"high", 2, 2), ("X-Priority", b"high", 2, 0), ("x-priority", b"low", None, 2),
        ("x-priority", b"HIGH", 2, 2), ("x-priority", b"", None, 1), ("x-other", b"high", None, 1),
    ],
)  # fmt: skip
def test_a_request_s_class(header: str | None, value: bytes, of_model: int | None, rank: int) -> None:
    """A client's word counts only where its header is asked for, and only if it is a class."""
    fields = [(b"accept", b"Accept", b"*/*", b""), (b"x-priority", b"X-Priority", value, b"")]
    assert Classes(header=header).rank(fields, of_model) == rank  # type: ignore[arg-type]
