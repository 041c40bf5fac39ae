"""The metrics of the reference prefill service, all declared here."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from prefill_reference.chat import ChunkRun

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Metrics:
    """The registry and its metrics. Labels have few values: outcomes and sources."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "prefill_requests", "Chat requests by outcome.", ["outcome"], registry=self.registry
        )
        self.first_token_seconds = Histogram(
            "prefill_first_token_seconds",
            "Seconds from having the images' bytes to the logits of the first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.chunk_wait_seconds = Histogram(
            "prefill_chunk_wait_seconds",
            "Seconds that a chunk waited for its rows.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.chunk_seconds = Histogram(
            "prefill_chunk_seconds",
            "Seconds that a chunk's forward pass took.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.rows = Counter(
            "prefill_rows",
            "Image rows fetched, by source.",
            ["source"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "prefill_prompt_tokens",
            "Prompt tokens, by how they were computed: prefilled, or cached by an earlier prompt.",
            ["how"],
            registry=self.registry,
        )
        self.generated_tokens = Counter(
            "prefill_generated_tokens", "Tokens generated.", registry=self.registry
        )

    def on_chunk(self, run: ChunkRun) -> None:
        """Record a chunk that was prefilled."""
        self.chunk_wait_seconds.observe(run.waited_ms / 1000)
        self.chunk_seconds.observe(run.prefill_ms / 1000)
        for window, source in zip(run.chunk.windows, run.sources, strict=True):
            self.rows.labels(source).inc(window.rows)
