"""The settings of processes that are clients of the encoder service."""

from dataclasses import dataclass

from encoder_contract.credentials import Credentials
from encoder_contract.settings import Settings, knob


@dataclass(frozen=True, kw_only=True)
class EncoderSettings(Settings):
    """Where the encoder service is, and how it is reached."""

    encoder: str = knob(
        "127.0.0.1:50051",
        help="address of the encoder service: host:port or unix:/path; dns:host:port: every replica behind that name",
    )
    encoder_tls_ca: str = knob(
        "", help="PEM file of the authorities that issue the encoder's certificate, or public; empty: no TLS"
    )
    encoder_tls_cert: str = knob(
        "", help="PEM file with the client certificate of this process, if the encoder requires one"
    )
    encoder_tls_key: str = knob("", help="PEM file with the private key of --encoder-tls-cert, unencrypted")
    encoder_tls_name: str = knob(
        "", help="name to expect in the encoder's certificate; empty: the host of --encoder"
    )
    encoder_token_file: str = knob(
        "", help="file with the tenant token of this process for the encoder; empty: no token"
    )

    @property
    def credentials(self) -> Credentials:
        """What calls to the encoder are authenticated with."""
        return Credentials(
            self.encoder_tls_ca,
            self.encoder_tls_cert,
            self.encoder_tls_key,
            self.encoder_tls_name,
            self.encoder_token_file,
        )
