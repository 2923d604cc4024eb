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
from gateway.telemetry.metrics import Metrics, Sources

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
UNIT = DEPLOY / "systemd" / "tokenpipe.service"
PROMETHEUS = DEPLOY / "prometheus" / "prometheus.yml"
RULES = DEPLOY / "prometheus" / "tokenpipe.rules.yml"

DRAIN = 120  # the default of timeouts.drain


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}")
    return found


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True)


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
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            for name in re.findall(r"[a-z:]*\btokenpipe_[a-z0-9_:]+|model:tokenpipe\w+:\w+", rule["expr"]):
                assert name in recorded or name.removesuffix("_bucket") in families, name
            assert "record" in rule or rule["annotations"]["summary"]
    result = run(tool("promtool"), "check", "rules", RULES)
    assert result.returncode == 0, result.stdout + result.stderr


REQUESTS = 'tokenpipe_requests_total{model="m",outcome="%s",code="%s"}'

# promtool's own test format: a house with one backend down, one model that fails and one that hangs
ALERTS = {
    "rule_files": [str(RULES)],
    "evaluation_interval": "1m",
    "tests": [
        {
            "interval": "1m",
            "input_series": [
                {"series": 'up{job="tokenpipe",instance="dead"}', "values": "0x30"},
                {"series": 'tokenpipe_backend_up{backend="b1",instance="a"}', "values": "0x30"},
                {"series": 'tokenpipe_backend_up{backend="b2",instance="a"}', "values": "1x30"},
                {"series": REQUESTS % ("complete", "200"), "values": "0+80x30"},
                {"series": REQUESTS % ("upstream_reset", "200"), "values": "0+20x30"},
                {"series": REQUESTS % ("upstream_status", "404"), "values": "0+900x30"},
                {"series": 'tokenpipe_requests_in_flight{model="h",phase="wait",instance="a"}', "values": "2x30"},
                {"series": 'tokenpipe_requests_in_flight{model="s",phase="wait",instance="a"}', "values": "2x30"},
                {"series": 'tokenpipe_requests_in_flight{model="s",phase="stream",instance="a"}', "values": "1x30"},
            ],
            "alert_rule_test": [
                {"eval_time": "20m", "alertname": "TokenpipeDown", "exp_alerts": [
                    {"exp_labels": {"severity": "page", "job": "tokenpipe", "instance": "dead"},
                     "exp_annotations": {"summary": "dead does not answer scrapes"}}]},
                {"eval_time": "20m", "alertname": "TokenpipeNoBackend", "exp_alerts": []},
                {"eval_time": "20m", "alertname": "TokenpipeBackendDown", "exp_alerts": [
                    {"exp_labels": {"severity": "ticket", "backend": "b1", "instance": "a"},
                     "exp_annotations": {"summary": "backend b1 has been down for 5 minutes"}}]},
                {"eval_time": "20m", "alertname": "TokenpipeFailures", "exp_alerts": []},
                {"eval_time": "20m", "alertname": "TokenpipeHang", "exp_alerts": [
                    {"exp_labels": {"severity": "page", "model": "h", "instance": "a"},
                     "exp_annotations": {"summary": "h: requests wait, nothing is answered"}}]},
            ],
            "promql_expr_test": [
                {"expr": "model:tokenpipe_failures:ratio_rate5m", "eval_time": "20m", "exp_samples": [
                    {"labels": 'model:tokenpipe_failures:ratio_rate5m{model="m"}', "value": 0.02}]},
            ],
        }
    ],
}  # fmt: skip


def test_alerts_fire(tmp_path: Path) -> None:
    promtool = tool("promtool")
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(ALERTS))
    result = run(promtool, "test", "rules", tmp_path / "alerts.yml")
    assert result.returncode == 0, result.stdout + result.stderr
