"""From rules.yml and alerts.yml to the PrometheusRule of component and chart: run it, or `--check` to compare."""

import sys
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
TARGETS = (
    HERE.parent / "kubernetes/components/monitoring/prometheusrule.yaml",
    HERE.parent / "helm/encoder-service/files/prometheusrule.yaml",
)
HEAD = "# Made of deploy/prometheus/rules.yml and alerts.yml by deploy/prometheus/operator.py.\n"


def rule() -> str:
    """Return the manifest; its two groups have the names of their files."""
    groups = []
    for name in ("rules", "alerts"):
        (group,) = yaml.safe_load((HERE / f"{name}.yml").read_text())["groups"]
        groups.append(group | {"name": f"{group['name']}-{name}"})
    manifest = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "encoder"},
        "spec": {"groups": groups},
    }
    return HEAD + yaml.safe_dump(manifest, sort_keys=False, width=1000)


def main() -> int:
    """Write the manifests, or with `--check` say whether they are up to date."""
    stale = [target for target in TARGETS if not target.exists() or target.read_text() != rule()]
    if "--check" not in sys.argv[1:]:
        for target in stale:
            target.write_text(rule())
        return 0
    for target in stale:
        sys.stderr.write(f"{target} is stale: run python {Path(__file__)}\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
