"""The producer of rows that an engine puts into the store, and the names it gives to images."""

from dataclasses import dataclass
from typing import Self

from encoder_contract.errors import InvalidRequestError
from encoder_contract.v1 import encoder_pb2 as pb

MAX_PRODUCER_BYTES = 64  # each field of a producer
MAX_DTYPE_BYTES = 16
MAX_SCHEME_BYTES, MAX_ENGINE_KEY_BYTES = 32, 64


@dataclass(frozen=True, slots=True)
class Producer:
    """Everything that decides the bits of put rows, as stated by the producer.

    `model` (architecture and configuration), `weights` and `processor` are fingerprints. `dtype` is the element type
    that the producer computes in, and `implementation` is its code and version. Raises `InvalidRequestError` for a
    field that is empty or too long.
    """

    model: bytes
    weights: bytes
    processor: bytes
    dtype: str
    implementation: str

    def __post_init__(self) -> None:
        fields = (self.model, self.weights, self.processor, self.implementation.encode())
        if not all(0 < len(field) <= MAX_PRODUCER_BYTES for field in fields):
            raise InvalidRequestError(
                "model, weights, processor and implementation of a producer must have 1 to "
                f"{MAX_PRODUCER_BYTES} bytes each"
            )
        if len(self.dtype.encode()) > MAX_DTYPE_BYTES:
            raise InvalidRequestError(f"the dtype of a producer may have at most {MAX_DTYPE_BYTES} bytes")

    @classmethod
    def from_message(cls, message: pb.Producer) -> Self:
        """Return the producer in a message of the contract."""
        return cls(message.model, message.weights, message.processor, message.dtype, message.implementation)

    def to_message(self) -> pb.Producer:
        """Return this producer as a message of the contract."""
        return pb.Producer(
            model=self.model,
            weights=self.weights,
            processor=self.processor,
            dtype=self.dtype,
            implementation=self.implementation,
        )


@dataclass(frozen=True, slots=True)
class EngineKey:
    """An engine's own name for an image, in a named scheme.

    The key must cover everything that the image's grid and rows depend on, except the producer. Raises
    `InvalidRequestError` for a scheme or key that is empty or too long.
    """

    scheme: str
    key: bytes

    def __post_init__(self) -> None:
        fits = 0 < len(self.scheme.encode()) <= MAX_SCHEME_BYTES and 0 < len(self.key) <= MAX_ENGINE_KEY_BYTES
        if not fits:
            raise InvalidRequestError(
                f"an engine key must have 1 to {MAX_ENGINE_KEY_BYTES} bytes, and its scheme 1 to {MAX_SCHEME_BYTES}"
            )

    @classmethod
    def from_message(cls, message: pb.EngineKey) -> Self:
        """Return the key in a message of the contract."""
        return cls(message.scheme, message.key)

    def to_message(self) -> pb.EngineKey:
        """Return this key as a message of the contract."""
        return pb.EngineKey(scheme=self.scheme, key=self.key)
