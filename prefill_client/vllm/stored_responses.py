"""Stored responses: the images of a conversation, for the requests that continue it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cachetools import LRUCache

from prefill_client.images import File, Submitted
from prefill_client.plugin.door import Medium
from prefill_client.vllm.image_name import ImageName

# Bytes of the files of stored responses, which are kept in case the service loses them. The least recently used are
# dropped first.
MAX_STORED_BYTES = 256 << 20
MAX_RESPONSES = 65536  # vLLM itself keeps every response for the life of its process


@dataclass(frozen=True, slots=True)
class Conversation:
    """The images of a conversation up to a response, in the order of its prompt: their digests and names.

    The names stand for rows of the engine's vision `weights` of that time.
    """

    digests: tuple[bytes, ...] = ()
    names: tuple[ImageName, ...] = ()
    tenant_salt: str = ""
    weights: str | None = ""

    def answers(self, media: Sequence[Medium], answers: Iterator[Submitted]) -> list[Submitted]:
        """Return an answer for each image. An image without a file was not submitted, and gets one without an endpoint.

        Consumes the answers to the files of `media`, these images.
        """
        images = zip(self.digests, media, strict=True)
        return [next(answers) if medium.files else Submitted(digest) for digest, medium in images]


class StoredResponses:
    """The images of responses that vLLM stores: a request that continues one needs them, but does not send them.

    Like vLLM's own store, each API server has one.
    """

    def __init__(self) -> None:
        self._responses: LRUCache[str, Conversation] = LRUCache(MAX_RESPONSES)
        self._files: LRUCache[bytes, bytes] = LRUCache(MAX_STORED_BYTES, getsizeof=len)

    def add(self, response_id: str, conversation: Conversation, new: Sequence[File]) -> None:
        """Remember a response with its images, of which the last have the files `new`."""
        self._responses[response_id] = conversation
        for digest, file in zip(reversed(conversation.digests), reversed(new), strict=False):
            if isinstance(file, bytes) and len(file) <= MAX_STORED_BYTES:
                self._files[digest] = file

    def conversation(self, response_id: str) -> Conversation:
        """Return the images up to a response; no images for an unknown one."""
        return self._responses.get(response_id, Conversation())

    def media(self, conversation: Conversation) -> list[Medium]:
        """Return the images of a conversation. One whose file has been dropped has none."""
        files = map(self._files.get, conversation.digests)
        return [Medium(f"image {index}", [] if file is None else [file]) for index, file in enumerate(files)]
