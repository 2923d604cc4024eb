"""The conformance kit against the gateway, one kind of cases after another. Minutes: see `make conformance`."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KIT = ROOT.parent / "shared" / "conformance"
KINDS = sorted(path.stem.removeprefix("cases_").replace("_", "-") for path in KIT.glob("cases_*.py"))


@pytest.mark.conformance
@pytest.mark.seconds(1200)
@pytest.mark.skipif(not KINDS, reason="the conformance kit does not lie beside this checkout")
@pytest.mark.parametrize("kind", KINDS)
def test_conformance(kind: str, tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    serve = f"{shlex.quote(sys.executable)} -m gateway serve"
    run = subprocess.run(
        [sys.executable, str(KIT / "run.py"), f"{serve} --port {{port}} --admin-port {{admin}} --backend {{upstream}}",
         "--config-command", f"{serve} -c {{config}}", "--kind", kind, "--log", str(log)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    print(run.stdout)
    failed = "\n".join(line for line in run.stdout.splitlines() if not line.startswith("ok  "))
    assert run.returncode == 0, f"{failed}\n{run.stderr}\nthe gateway's own output is in {log}"
