"""The metrics of the gateway, all declared here."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from encoder_contract.certificates import Certificates, expirations

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)


class GatewayMetrics:
    """The registry and its metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.parts = Counter(
            "sglang_gateway_parts",
            "Parts of SGLang's requests, by outcome.",
            ["outcome"],
            registry=self.registry,
        )
        self.service_up = Gauge(
            "sglang_gateway_service_up",
            "1 while at least one replica of the encoder service serves, else 0.",
            registry=self.registry,
        )
        self.certificate_expiration = Gauge(
            "sglang_gateway_certificate_expiration_timestamp_seconds",
            "When the gateway's client certificate expires, seconds since 1970.",
            ["certificate"],
            registry=self.registry,
        )
        self.parts_now = Gauge(
            "sglang_gateway_parts_now",
            "Parts that are being served or wait to be served.",
            registry=self.registry,
        )
        self.images = Counter(
            "sglang_gateway_images",
            "Images and pairs of video frames whose rows were fetched, by where the service found the rows.",
            ["source"],
            registry=self.registry,
        )
        self.row_bytes = Counter(
            "sglang_gateway_row_bytes",
            "Bytes of rows sent to SGLang, counted once per part.",
            registry=self.registry,
        )
        self.seconds = Histogram(
            "sglang_gateway_part_seconds",
            "Seconds from reading a part to having sent its rows.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.retries = Counter(
            "sglang_gateway_retries",
            "Failed attempts at a part that were retried.",
            registry=self.registry,
        )
        for outcome in ("served", "stand_in", "refused", "failed", "left"):
            self.parts.labels(outcome)

    def watch_certificate(self, certificates: Certificates) -> None:
        """Tell when the certificate with which the gateway calls the service expires."""
        gauge = self.certificate_expiration.labels("client")
        gauge.set_function(lambda: min(expirations(certificates.pem.cert)))

    def served(self, outcome: str, row_bytes: int, seconds: float) -> None:
        """Count a part whose rows were sent."""
        self.parts.labels(outcome).inc()
        self.row_bytes.inc(row_bytes)
        self.seconds.observe(seconds)
