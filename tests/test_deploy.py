"""The files under deploy/ are used: by the programs that they are for where these are installed, else parsed."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.core.exchange import Exchange
from gateway.telemetry.histogram import B_GAP, B_OVH, B_TTFT
from gateway.telemetry.metrics import Metrics, Sources

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
UNIT = DEPLOY / "systemd" / "tokenpipe.service"
PROMETHEUS = DEPLOY / "prometheus" / "prometheus.yml"
RULES = DEPLOY / "prometheus" / "tokenpipe.rules.yml"
RULES_TEST = DEPLOY / "prometheus" / "tokenpipe.rules.test.yml"

DRAIN = 120  # the default of timeouts.drain


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}")
    return found


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True)


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes=("#", ";"))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser


def test_the_unit_says_what_the_gateway_does() -> None:
    service = unit()["Service"]
    assert service["Type"] == "notify"
    assert service["ExecStart"] == "/usr/bin/tokenpipe serve -c /etc/tokenpipe/tokenpipe.yaml"
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert service["KillMode"] == "mixed"
    assert service["Restart"] == "on-failure"
    assert int(service["TimeoutStopSec"]) > DRAIN
    assert int(service["LimitNOFILE"]) == 65536
    for name, value in {
        "ProtectSystem": "strict",
        "NoNewPrivileges": "yes",
        "DynamicUser": "yes",
        "PrivateTmp": "yes",
        "MemoryDenyWriteExecute": "yes",
        "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
    }.items():
        assert service[name] == value
    assert "SystemCallFilter=@system-service" in UNIT.read_text().splitlines()


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = tool("systemd-analyze")
    copy = tmp_path / UNIT.name  # with a command that is there, whether or not tokenpipe is installed
    copy.write_text(UNIT.read_text().replace("/usr/bin/tokenpipe", sys.executable))
    result = run(analyze, "verify", "--man=no", copy)
    # It looks through what the unit depends on as well: the machine's own units are not ours to mend.
    ours = [line for line in (result.stdout + result.stderr).splitlines() if UNIT.stem in line]
    assert ours == []


def test_systemd_finds_the_unit_hardened() -> None:
    result = run(tool("systemd-analyze"), "security", "--offline=yes", UNIT)
    exposure = re.search(r"exposure level for \S+: ([0-9.]+)", result.stdout)
    if exposure is None:
        pytest.skip(f"this systemd-analyze looks at no files: {result.stderr[:200]}")
    assert float(exposure[1]) < 2.5, result.stdout


def test_prometheus_takes_the_scrape_job() -> None:
    config: dict[str, Any] = yaml.safe_load(PROMETHEUS.read_text())
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "tokenpipe"
    assert job["static_configs"][0]["targets"] == ["127.0.0.1:9400"]  # admin.listen's default
    assert config["rule_files"] == [RULES.name]
    result = run(tool("promtool"), "check", "config", PROMETHEUS)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "SUCCESS" in result.stdout


def test_rules_ask_for_what_is_exported() -> None:
    live: list[Exchange] = []
    metrics = Metrics(Sources(list, lambda: live, list, lambda: 0, list), wall=lambda: 0.0, version="1")
    families = set(re.findall(r"^# TYPE (\S+)", b"".join(metrics.render(None)[0]).decode(), re.MULTILINE))
    recorded = set(re.findall(r"record: (\S+)", RULES.read_text()))
    for rule in rules():
        for name in re.findall(r"[a-z:]*\btokenpipe_[a-z0-9_:]+|model:tokenpipe\w+:\w+", rule["expr"]):
            assert name in recorded or re.sub("_(bucket|count|sum)$", "", name) in families, name
        assert "record" in rule or rule["annotations"]["summary"]
    result = run(tool("promtool"), "check", "rules", RULES)
    assert result.returncode == 0, result.stdout + result.stderr


def test_alerts_fire_and_do_not() -> None:
    """Each alert, by the test file that lies beside the rules for whoever changes them."""
    tests = yaml.safe_load(RULES_TEST.read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert fired == alerts
    result = run(tool("promtool"), "test", "rules", RULES_TEST)
    assert result.returncode == 0, result.stdout + result.stderr


def test_thresholds_are_edges() -> None:
    """What lies within a bucket would be a guess."""
    edges = {
        "time_to_first_token": B_TTFT, "abandoned": B_TTFT, "stream_max_gap": B_GAP, "overhead": B_OVH, "event_loop_lag": B_OVH,
    }  # fmt: skip
    told: list[tuple[str, str]] = []
    for rule in rules():
        told += re.findall(r'tokenpipe_(\w+)_seconds_bucket\{[^}]*le="([^"]+)"', rule["expr"])
        told += re.findall(r"histogram_quantile.*tokenpipe_(\w+)_seconds_bucket.* > ([0-9.]+)$", rule["expr"])
    assert {name for name, _ in told} == edges.keys()
    for name, threshold in told:
        assert float(threshold) in edges[name], (name, threshold)
