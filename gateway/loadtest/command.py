"""`tokenpipe loadtest`: from flags to exit status.

0  the run is done, and some request succeeded
1  every request failed, the endpoint cannot be reached, or the run was interrupted (what is finished is reported)
2  bad usage
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import os
import resource
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from gateway.errors import ConfigError
from gateway.loadtest import datasets, results, schedule, target
from gateway.loadtest.client import Client, LoadtestFailed, first_model
from gateway.loadtest.compare import compare
from gateway.loadtest.datasets import Prompt
from gateway.loadtest.endpoints import Asking
from gateway.loadtest.progress import Progress
from gateway.loadtest.records import Run
from gateway.loadtest.results import Measured
from gateway.loadtest.runner import Interrupt, Runner
from gateway.loadtest.settings import Settings, build
from gateway.loadtest.statistics import check_tester, errors, measure, success_rule

Plan = tuple[list[list[Prompt]], list[list[float]]]  # of each endpoint: the prompts, and when they are sent
_OF_RESULT = ("save_detailed", "result_dir", "result_filename")  # flags of no use without --save-result


def loadtest(flags: Mapping[str, Any]) -> int:
    """Run the load that the flags ask for, print and write its result. Raises ConfigError, LoadtestFailed."""
    settings = build(
        {**flags, "request_id_prefix": flags["request_id_prefix"] or f"bench-{secrets.token_hex(4)}-"}, _key(flags)
    )
    for flag, path in (("--report", settings.report), ("--plot", settings.plot)):
        if path is not None:
            _writable(path)
            _need_plots(flag)
    _fits_memory(settings)
    if settings.save_result:
        _result_folder(settings)
    elif unused := [flag for flag in _OF_RESULT if flags[flag]]:
        names = " and ".join("--" + flag.replace("_", "-") for flag in unused)
        _say(f"nothing is written for {names}: add --save-result")
    _take_descriptors()
    measured: list[Measured] = []

    def ended(model: str, run: Run) -> None:
        """A run's figures, once it is done: what a sweep has must not wait for its last rate."""
        each = _measured(settings, run)
        measured.append(each)
        print(results.table(settings, each), flush=True)
        if settings.save_result:
            path = results.result_path(settings, model, run)
            results.save(path, results.as_json(settings, model, each), settings.append_result)
            _say(f"the result is in {path}")

    with asyncio.Runner(loop_factory=_loop_factory()) as loop:
        model = loop.run(_load(settings, ended))
    if measured:
        _draw(settings, model, measured)
    if any(each.run.interrupted for each in measured) or len(measured) < len(settings.rates):
        _say("interrupted: reported is what was finished")
        return 1
    if not any(metrics.completed for each in measured for metrics in each.metrics):
        _say("every request failed")
        return 1
    return 0


def _key(flags: Mapping[str, Any]) -> str | None:
    path: Path | None = flags["api_key_file"]
    if path is None:
        return os.environ.get("OPENAI_API_KEY") or None
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: {path} cannot be read: {error}") from None
    if not key:
        raise ConfigError(f"--api-key-file: {path} is empty")
    return key


def _need_plots(flag: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"{flag} needs matplotlib, which is not installed: pip install matplotlib (the extra tokenpipe[report])"
        )


def _writable(path: Path) -> None:
    """Before the run, not after it: an hour's figures must not be lost for a folder that is not there."""
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: {path.parent} is no folder that you may write to")


def _result_folder(settings: Settings) -> None:
    """Likewise before the run: where its result goes."""
    path = (settings.result_dir or Path()) / (settings.result_filename or "")
    folder = path.parent if settings.result_filename else path
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--result-dir: {folder} cannot be made: {error.strerror or error}") from None
    if not os.access(folder, os.W_OK) or (settings.result_filename and path.is_dir()):
        raise ConfigError(f"the result cannot be written to {path}: expected a file in a folder that you may write to")


def _fits_memory(settings: Settings) -> None:
    """Prompts are made before the clock starts, so that making them is no part of what is measured."""
    needed = datasets.octets(settings.dataset, settings.num_prompts + settings.num_warmups) * len(settings.urls)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there / 2:
        raise ConfigError(
            f"the prompts of {settings.num_prompts} requests would take some {needed / 2**30:,.1f} GiB of memory, and this"
            f" machine has {there / 2**30:,.1f}: expected fewer (--num-prompts, --num-warmups) or shorter ones (--input-len)"
        )


def _take_descriptors() -> None:
    """Each request under way needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _say(text: str) -> None:
    print(f"tokenpipe: {text}", file=sys.stderr, flush=True)


# -- the load ----------------------------------------------------------------------------------------------------------


async def _load(settings: Settings, ended: Callable[[str, Run], None]) -> str:
    """The model that was asked for. `ended` is told it, and each run that is done: fewer than rates, if interrupted."""
    interrupt = Interrupt()
    with interrupt.watched():
        flags = ("URL", "--compare")
        targets = [
            target.parse(flag, url, settings.endpoint, insecure=settings.insecure)
            for flag, url in zip(flags, settings.urls, strict=False)
        ]
        asking = Asking(settings.kind, settings.model or "", settings.ignore_eos, settings.logprobs, settings.extra_body)
        clients = [_client(settings, each, asking) for each in targets]
        await _reachable(settings, clients, interrupt)
        if not asking.model:
            asking = dataclasses.replace(asking, model=await first_model(targets[0], settings.fields))
            clients = [_client(settings, each, asking) for each in targets]
        runner = Runner(clients, settings.max_concurrency, interrupt)
        for place, rate in enumerate(settings.rates):
            try:
                with interrupt.raised():
                    prompts, times = plan(settings, rate, place)
            except KeyboardInterrupt:
                break
            if settings.num_warmups and place == 0:
                await _warm_up(settings, runner, prompts[0][0])
            if interrupt.happened:
                break
            for client, name in zip(clients, ("", "second-"), strict=False):  # one engine may see the requests of all
                client.request_id_prefix = f"{settings.request_id_prefix}{name}{f'{place + 1}-' if place else ''}"
            _announce(settings, len(times[0]), rate, asking.model)
            progress = Progress(runner, settings.progress)
            progress.begin()
            try:
                run = await runner.run(prompts, times, rate)
            finally:
                progress.end()
            if settings.ramp is not None:
                run.rates = schedule.rate_changes(settings.ramp, times[0])
            ended(asking.model, run)
        for client in clients:
            client.close()
        return asking.model


def _client(settings: Settings, where: target.Target, asking: Asking) -> Client:
    return Client(
        where,
        asking,
        settings.fields,
        timeout=settings.timeout,
        request_id_prefix=settings.request_id_prefix,
        keep_bodies=settings.save_detailed,
    )


async def _reachable(settings: Settings, clients: Sequence[Client], interrupt: Interrupt) -> None:
    """That all endpoints take connections, after --ready-check-timeout-sec at most. Raises LoadtestFailed."""
    until = time.monotonic() + settings.ready_timeout
    for client in clients:
        while True:
            try:
                await client.check()
                break
            except LoadtestFailed:
                if time.monotonic() >= until or interrupt.happened:
                    raise
                await asyncio.sleep(min(1.0, max(0.05, until - time.monotonic())))


async def _warm_up(settings: Settings, runner: Runner, prompt: Prompt) -> None:
    _say(f"warming up with {settings.num_warmups} requests")
    failed = errors(await runner.warm_up(prompt, settings.num_warmups), most=3)
    for text, count in failed:
        _say(f"of the warm-up {count} failed: {text}")


def _announce(settings: Settings, count: int, rate: float, model: str) -> None:
    ramp = settings.ramp
    if ramp is not None:
        traffic = f"{ramp.start:g} to {ramp.end:g} requests a second"
    else:
        traffic = "all at once" if rate == float("inf") else f"{rate:g} requests a second"
    most = f", {settings.max_concurrency} under way at most" if settings.max_concurrency else ""
    urls = " and ".join(settings.urls)
    each = " each" if settings.compare else ""
    what = "request" if count == 1 else "requests"
    _say(f"{count} {what}{each} to {urls} ({settings.backend}, model {model}), {traffic}{most}")


def plan(settings: Settings, rate: float, place: int) -> Plan:
    """The prompts of a run and their times. `place`: of the run in a sweep, whose runs must not share prompts."""
    ramp, seed = settings.ramp, settings.dataset.seed
    first = _of_modules(settings, datasets.prompts(settings.dataset, settings.num_prompts, f"{place}"), place)
    count = len(first)
    times = schedule.arrivals(count, rate, settings.burstiness, ramp, Random(f"{seed}/arrivals/{place}"))
    if settings.compare is None:
        return [first], [times]
    # The same lengths and other words, where words are made up: an engine behind both must not know them already.
    second = _of_modules(settings, datasets.prompts(settings.dataset, count, f"{place}/second"), place)
    pace = rate if ramp is None else count / times[-1] if times[-1] > 0 else float("inf")
    both = schedule.pairs(times, pace, Random(f"{seed}/pairs/{place}"))
    return [first, second], [[one for one, _ in both], [other for _, other in both]]


def _of_modules(settings: Settings, prompts: list[Prompt], place: int) -> list[Prompt]:
    """Each with one of --lora-modules, if there are any: the same for both of a pair."""
    modules, random = settings.lora_modules, Random(f"{settings.dataset.seed}/modules/{place}")
    if not modules:
        return prompts
    return [
        dataclasses.replace(prompt, model=modules[index % len(modules)] if settings.lora_in_turn else random.choice(modules))
        for index, prompt in enumerate(prompts)
    ]


# -- what came of it ---------------------------------------------------------------------------------------------------


def _measured(settings: Settings, run: Run) -> Measured:
    succeeded = success_rule(settings.success, settings.kind)
    metrics = tuple(
        measure(records, run.duration, succeeded, settings.percentiles, settings.goodput) for records in run.records
    )
    differences = tuple(compare(run.records[0], run.records[1], succeeded)) if len(run.records) > 1 else ()
    return Measured(run, metrics, succeeded, check_tester(run), differences)


def _draw(settings: Settings, model: str, measured: Sequence[Measured]) -> None:
    if settings.plot is not None:
        from gateway.loadtest.plots import picture

        picture(settings.plot, measured, settings)
        _say(f"the plots are in {settings.plot}")
    if settings.report is not None:
        from gateway.loadtest.report import write

        write(settings.report, settings, model, measured)
        _say(f"the report is in {settings.report}")
