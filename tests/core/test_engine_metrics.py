"""What is read of an engine's metrics: a real vLLM's page, SGLang's names, several ranks, and whatever is odd."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.engine_metrics import asleep, read
from gateway.core.load import EngineLoad
from gateway.synthetic.metrics import EngineMetrics

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
"""
SGLANG = """\
sglang:num_running_reqs{engine_type="unified",model_name="q",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 8.0
sglang:num_queue_reqs{engine_type="unified",model_name="q",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 4.0
sglang:token_usage{engine_type="unified",model_name="q",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0.52
"""


def test_vllm() -> None:
    assert read(VLLM.encode()) == EngineLoad(3, 2, 0.25)


def test_vllm_before_its_cache_was_renamed() -> None:
    assert read(VLLM.replace("kv_cache", "gpu_cache").encode()) == EngineLoad(3, 2, 0.25)
    both = VLLM + 'vllm:gpu_cache_usage_perc{engine="0"} 0.9\n'
    assert read(both.encode()) == EngineLoad(3, 2, 0.25)


def test_sglang() -> None:
    assert read(SGLANG.encode()) == EngineLoad(8, 4, 0.52)


def test_ranks() -> None:
    """Of data parallelism all count, and the cache's use is their mean; tensor parallel ones say the same, so once."""
    vllm = VLLM + VLLM.replace('engine="0"', 'engine="1"').replace("3.0", "5.0").replace("0.25", "0.75")
    assert read(vllm.encode()) == EngineLoad(8, 4, 0.5)
    sglang = "".join(
        SGLANG.replace("{", f'{{dp_rank="{dp}",').replace('tp_rank="0"', f'tp_rank="{tp}"') for dp in "01" for tp in "0123"
    )
    assert read(sglang.encode()) == EngineLoad(16, 8, 0.52)


def test_the_synthetic_engine() -> None:
    """It speaks vLLM's names, by prometheus_client's own writer."""
    metrics = EngineMetrics("m")
    metrics.running.set(7)
    metrics.waiting.set(5)
    metrics.kv_usage.set(0.125)
    assert read(metrics.render()) == EngineLoad(7, 5, 0.125)


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("", None),
        ("\n\n", None),
        ("<html>vllm:num_requests_running 3</html>", None),
        ("vllm:num_requests_running_ever 3\n", None),
        ("# vllm:num_requests_running 3\n", None),
        ("vllm:num_requests_running", None),
        ("vllm:num_requests_running{", None),
        ('vllm:num_requests_running{engine="0"}', None),
        ("vllm:num_requests_running{} x\n", None),
        ("vllm:num_requests_running NaN\n", None),
        ("vllm:num_requests_running +Inf\n", None),
        ("vllm:num_requests_waiting 3\n", None),
        ("vllm:num_requests_running 3", EngineLoad(3, 0)),
        ("vllm:num_requests_running 3\r\n", EngineLoad(3, 0)),
        ("vllm:num_requests_running  3e0\t1700000000\n", EngineLoad(3, 0)),
        ("vllm:num_requests_running -3\n", EngineLoad(0, 0)),
        ('vllm:num_requests_running{model_name="a}b\\"c, engine=\\"9"} 3\n', EngineLoad(3, 0)),
        ("vllm:num_requests_running 3\nvllm:num_requests_waiting nonsense\n", EngineLoad(3, 0)),
        ("\xff\x00\nvllm:num_requests_running 3\n", EngineLoad(3, 0)),
    ],
)
def test_odd_pages(page: str, found: EngineLoad | None) -> None:
    assert read(page.encode("latin-1")) == found


def test_a_flood_of_samples_is_bounded() -> None:
    """What a broken exporter repeats without end costs no more than it says."""
    page = b"".join(b'vllm:num_requests_running{engine="%d"} 1\n' % rank for rank in range(100_000))
    found = read(page)
    assert found
    assert found.running <= 1024


def test_cut_anywhere_nothing_is_made_up() -> None:
    """Whatever the page's end, what is read are its figures, or fewer."""
    page = VLLM.encode()
    for end in range(len(page)):
        found = read(page[:end])
        assert found is None or (found.running in (0, 3) and found.waiting in (0, 2) and found.kv_usage in (0, 0.2, 0.25))


RECORDED = Path(__file__).resolve().parents[1] / "data" / "vllm_metrics.txt"


def test_a_recorded_page() -> None:
    """All of what a vLLM 0.32 says, with figures put in: the same as a whole parse of it finds."""
    chance, page = random.Random(1), RECORDED.read_text()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        line = f'vllm:{name}{{engine="0",model_name="tiny"}} '
        assert line in page
        page = page.replace(f"{line}0.0", f"{line}{chance.randint(1, 9)}")
    values = {s.name: s.value for family in text_string_to_metric_families(page) for s in family.samples}
    assert read(page.encode()) == EngineLoad(
        values["vllm:num_requests_running"], values["vllm:num_requests_waiting"], values["vllm:kv_cache_usage_perc"],
        asleep=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "found"),
    [(("0.0",), True), (("1.0",), False), (("0.0", "0.0"), True), (("0", "1"), False), ((), None), (("x",), None)],
)
def test_sleep(ranks: tuple[str, ...], found: bool | None) -> None:
    """vLLM's own words: awake is 0 where it sleeps, for each engine of it; other states of the same name say nothing."""
    name = "vllm:engine_sleep_state"
    lines = [f'{name}{{engine="{n}",model_name="m",sleep_state="awake"}} {value}' for n, value in enumerate(ranks)]
    lines.append(f'{name}{{engine="0",model_name="m",sleep_state="discard_all"}} 1.0')
    page = "\n".join(["vllm:num_requests_running 0", *lines]).encode()
    assert asleep(page) is found
    load = read(page)
    assert load is not None and load.asleep is found
