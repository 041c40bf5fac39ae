"""The configuration of the gateway for SGLang."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from encoder_contract.settings import knob
from prefill_client.encoder_settings import EncoderSettings
from prefill_client.media.destinations import Destinations
from prefill_client.sglang_gateway.parts import AllowedReceivers


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(EncoderSettings):
    """All settings. Validated on construction: a bad value is a `ConfigError` at start."""

    environment_prefix = "SGLANGSVC_"

    encoder: str = knob(
        "127.0.0.1:50051",
        help="addresses of the encoder service, comma-separated: host:port or unix:/path; dns:host:port: every replica "
        "behind that name",
    )
    tenant_salt: str = knob(
        "",
        help="part of the address of every image: embeddings are shared only with clients of the same salt",
    )
    start_s: float = knob(300.0, help="seconds to wait for the encoder service at start")
    listen: str = knob(
        "127.0.0.1:30001",
        help="host:port to serve SGLang on, without authentication; port 0 picks a free port",
    )
    receivers: str = knob(
        "127.0.0.0/8,::1",
        help="addresses and networks, comma-separated, to which rows may be sent: those of SGLang",
    )
    receiver_ports: str = knob("1024-65535", help="range of ports to which rows may be sent")
    language_model: str = knob(
        "",
        help="folder of the checkpoint that SGLang serves; a service with other vision weights or image processor "
        "settings is refused at start; empty: not compared",
    )
    register_at: str = knob(
        "",
        help="SGLang's encoder bootstrap servers to register at, comma-separated: http://host:8997; empty: SGLang is "
        "started with --encoder-urls",
    )
    register_as: str = knob(
        "", help="URL under which SGLang reaches this gateway; empty: http:// and --listen"
    )
    virtual_encoders: int = knob(
        8,
        zero=True,
        help="encoders to register as, /v0 and on: SGLang spreads a request's images; 0: one, without path",
    )
    max_parts: int = knob(64, help="most parts served at the same time; further ones wait unread")
    max_body_bytes: int = knob(256 << 20, help="largest request body, bytes")
    max_images: int = knob(256, help="most images in one part")
    max_image_bytes: int = knob(32 << 20, help="largest image file, bytes")
    part_s: float = knob(
        120.0,
        help="seconds that the images of a part may take, with all retries; less than SGLang's own timeout (180)",
    )
    image_hosts: str = knob(
        "",
        help="hosts that URLs of images and videos may name, comma-separated: host names, addresses, networks, or "
        "`public` for every public host; empty: only files sent with the request are accepted",
    )
    image_s: float = knob(10.0, help="seconds that the download of one image or video may take")
    log_level: Literal["debug", "info", "warning", "error"] = knob("info", help="least severity to log")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_endpoint("listen", tcp=True)
        for name, read in (
            ("image_hosts", lambda: self.image_destinations),
            ("receivers", lambda: AllowedReceivers(_listed(self.receivers), "1-65535")),
            ("receiver_ports", lambda: self.allowed_receivers),
        ):
            try:
                read()
            except ValueError as error:
                self._require(False, name, f"is wrong: {error}")
        self._require(bool(self.endpoints), "encoder", "must name at least one server")
        folder = not self.language_model or Path(self.language_model).is_dir()
        self._require(folder, "language_model", "must be the folder of a checkpoint")

    @property
    def endpoints(self) -> list[str]:
        """What `encoder` lists."""
        return _listed(self.encoder)

    @property
    def image_destinations(self) -> Destinations:
        """What `image_hosts` allows."""
        return Destinations(_listed(self.image_hosts))

    @property
    def allowed_receivers(self) -> AllowedReceivers:
        """What `receivers` and `receiver_ports` allow."""
        return AllowedReceivers(_listed(self.receivers), self.receiver_ports)

    @property
    def bootstrap_servers(self) -> list[str]:
        """What `register_at` lists."""
        return [each.removesuffix("/") for each in _listed(self.register_at)]


def _listed(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]
