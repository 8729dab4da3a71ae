"""What Prometheus itself says to the alerts and to the dashboard's queries: by ``promtool``, where it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from pages import ROOT

PROMTOOL = shutil.which("promtool")
GRAFANA = ROOT / "docs" / "grafana"
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="no promtool here: apt-get install prometheus brings it")


def promtool(*arguments: object) -> str:
    """What it answers; an error where it is not satisfied."""
    command = [str(PROMTOOL), *map(str, arguments)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stdout + child.stderr
    return child.stdout


def test_alerts_are_rules() -> None:
    rules = yaml.safe_load((GRAFANA / "alerts.yml").read_text())["groups"][0]["rules"]
    assert f"{len(rules)} rules found" in promtool("check", "rules", GRAFANA / "alerts.yml")


def test_each_alert_fires_when_it_should() -> None:
    cases = yaml.safe_load((ROOT / "tests" / "docs" / "alerts_test.yml").read_text())["tests"]
    fired = {test["alertname"] for case in cases for test in case["alert_rule_test"] if test["exp_alerts"]}
    rules = yaml.safe_load((GRAFANA / "alerts.yml").read_text())["groups"][0]["rules"]
    assert fired == {rule["alert"] for rule in rules}
    promtool("test", "rules", ROOT / "tests" / "docs" / "alerts_test.yml")


def test_queries_of_the_dashboard_can_be_read(tmp_path: Path) -> None:
    """With values for Grafana's own variables."""
    panels = json.loads((GRAFANA / "dcp-block.json").read_text())["panels"]
    queries = [target["expr"].replace("$__rate_interval", "1m") for panel in panels for target in panel["targets"]]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", tmp_path / "rules.yml")


def test_a_query_that_is_none_is_seen(tmp_path: Path) -> None:
    rules = {"groups": [{"name": "dashboard", "rules": [{"record": "a", "expr": "sum by (x) (rate(b[1m])"}]}]}
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    with pytest.raises(AssertionError, match="could not parse expression"):
        promtool("check", "rules", tmp_path / "rules.yml")
