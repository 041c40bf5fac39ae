"""The producer of rows that are put into a store, and its names of images."""

from dataclasses import dataclass
from typing import Self

from encoder_contract.errors import InvalidRequestError
from encoder_contract.v1 import encoder_pb2 as pb

MAX_PRODUCER_BYTES = 64  # each field of a producer
MAX_DTYPE_BYTES = 16
MAX_SCHEME_BYTES, MAX_ENGINE_KEY_BYTES = 32, 64


@dataclass(frozen=True, slots=True)
class Producer:
    """Everything that decides the bits of rows that were put, as the producer says it.

    `model` (architecture and configuration), `weights` and `processor` are fingerprints, `dtype` is the element type it
    computes in, `implementation` code and version. Raises `InvalidRequestError` for a field that is empty or too long.
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
                "model, weights, processor and implementation of a producer have 1 to "
                f"{MAX_PRODUCER_BYTES} bytes each"
            )
        if len(self.dtype.encode()) > MAX_DTYPE_BYTES:
            raise InvalidRequestError(f"the dtype of a producer has at most {MAX_DTYPE_BYTES} bytes")

    @classmethod
    def from_message(cls, message: pb.Producer) -> Self:
        """Return the producer that a message of the contract names."""
        return cls(message.model, message.weights, message.processor, message.dtype, message.implementation)

    def to_message(self) -> pb.Producer:
        """Return the message of the contract that names this producer."""
        return pb.Producer(
            model=self.model,
            weights=self.weights,
            processor=self.processor,
            dtype=self.dtype,
            implementation=self.implementation,
        )


@dataclass(frozen=True, slots=True)
class EngineKey:
    """An engine's own name of an image, under a named scheme.

    The key covers all that the image's grid and rows depend on, other than the producer. Raises `InvalidRequestError`
    for one that is empty or too long.
    """

    scheme: str
    key: bytes

    def __post_init__(self) -> None:
        fits = 0 < len(self.scheme.encode()) <= MAX_SCHEME_BYTES and 0 < len(self.key) <= MAX_ENGINE_KEY_BYTES
        if not fits:
            raise InvalidRequestError(
                f"an engine's key has 1 to {MAX_ENGINE_KEY_BYTES} bytes, its scheme 1 to {MAX_SCHEME_BYTES}"
            )

    @classmethod
    def from_message(cls, message: pb.EngineKey) -> Self:
        """Return the key that a message of the contract names."""
        return cls(message.scheme, message.key)

    def to_message(self) -> pb.EngineKey:
        """Return the message of the contract that names this key."""
        return pb.EngineKey(scheme=self.scheme, key=self.key)
