"""The configuration of the gateway for SGLang."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from encoder_contract.settings import knob
from prefill_client.http_settings import HttpSettings, listed
from prefill_client.sglang_gateway.parts import AllowedReceivers


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(HttpSettings):
    """All settings, validated on construction. A bad value raises `ConfigError`."""

    environment_prefix = "SGLANGSVC_"

    encoder: str = knob(
        "127.0.0.1:50051",
        help="addresses of the encoder service, comma-separated: host:port or unix:/path, or dns:host:port for every "
        "replica behind that name",
    )
    tenant_salt: str = knob(
        "", help="part of the address of every image: only clients with the same salt share embeddings"
    )
    start_s: float = knob(300.0, help="seconds to wait for the encoder service at start")
    listen: str = knob(
        "127.0.0.1:30001",
        help="host:port to serve SGLang on, without authentication; port 0 picks a free port",
    )
    receivers: str = knob(
        "127.0.0.0/8,::1",
        help="addresses and networks to which rows may be sent, comma-separated: those of SGLang",
    )
    receiver_ports: str = knob("1024-65535", help="range of ports to which rows may be sent")
    language_model: str = knob(
        "",
        help="folder of the checkpoint that SGLang serves; the gateway does not start if the service has other vision "
        "weights or image processor settings; empty: not compared",
    )
    register_at: str = knob(
        "",
        help="SGLang's encoder bootstrap servers to register at, comma-separated, such as http://host:8997; empty: "
        "SGLang finds the gateway by --encoder-urls",
    )
    register_as: str = knob(
        "", help="URL under which SGLang reaches this gateway; empty: http:// and the address of --listen"
    )
    virtual_encoders: int = knob(
        8,
        zero=True,
        most=512,  # a request is sent in as many parts, each an HTTP request
        help="number of encoders to register as, under the paths /v0, /v1 and so on, so that SGLang sends the images "
        "of a request in several parts; 0: one encoder without a path",
    )
    max_parts: int = knob(
        64,
        most=65_536,  # each is an open connection
        help="largest number of parts served at the same time; more parts wait unread",
    )
    max_images: int = knob(
        256,
        most=65_536,  # their names alone are 16 MB
        help="largest number of images in one part",
    )
    part_rows_gib: float = knob(
        1.0, help="largest size of the rows of one part, GiB; a part with more is refused"
    )
    rows_gib: float = knob(
        2.0, help="largest size of the rows of all parts, GiB; more parts wait; at least --part-rows-gib"
    )
    part_s: float = knob(
        120.0,
        help="seconds that the images of a part may take, with all retries; keep it below SGLang's own timeout (180)",
    )
    log_level: Literal["debug", "info", "warning", "error"] = knob("info", help="lowest severity to log")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, ports in (("receivers", "1-65535"), ("receiver_ports", self.receiver_ports)):
            try:
                AllowedReceivers(listed(self.receivers), ports)
            except ValueError as error:
                self._require(False, name, f"is invalid: {error}")
        self._require(self.rows_gib >= self.part_rows_gib, "rows_gib", "must be at least --part-rows-gib")
        self._require(bool(self.endpoints), "encoder", "must name at least one server")
        for name in ("register_at", "register_as"):
            are_urls = all(url.startswith(("http://", "https://")) for url in listed(getattr(self, name)))
            self._require(are_urls, name, "must begin with http:// or https://")
        is_folder = not self.language_model or Path(self.language_model).is_dir()
        self._require(is_folder, "language_model", "must be the folder of a checkpoint")

    @property
    def endpoints(self) -> list[str]:
        """The addresses in `encoder`."""
        return listed(self.encoder)

    @property
    def allowed_receivers(self) -> AllowedReceivers:
        """The addresses and ports that `receivers` and `receiver_ports` allow."""
        return AllowedReceivers(listed(self.receivers), self.receiver_ports)

    @property
    def bootstrap_servers(self) -> list[str]:
        """The URLs in `register_at`."""
        return [url.removesuffix("/") for url in listed(self.register_at)]
