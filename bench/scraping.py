"""What a server's metrics said at two moments, for benchmarks."""

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def scrape(metrics_url: str) -> dict[str, float]:
    """Return every unlabelled sample and the lag histogram's buckets, by name."""
    with urllib.request.urlopen(metrics_url.rstrip("/") + "/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name + (f"<{sample.labels['le']}" if set(sample.labels) == {"le"} else "")
            if not sample.labels or "<" in name:
                samples[name] = sample.value
    return samples


def lag_quantile(before: dict[str, float], after: dict[str, float], share: float) -> float:
    """Return the upper edge of the bucket in which the quantile of the loop's lag lies, seconds."""
    prefix = "encsvc_event_loop_lag_seconds_bucket<"
    counts = {float(k.removeprefix(prefix)): v - before[k] for k, v in after.items() if k.startswith(prefix)}
    total = max(counts.values())
    return min(edge for edge, count in counts.items() if count >= share * total)
