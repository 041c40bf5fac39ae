"""The index in Redis: which replica holds which embedding, and who encodes what."""

from encoder_service.cluster.index.redis_index import RedisIndex
from encoder_service.cluster.index.schema import namespace
from encoder_service.cluster.index.settings import RedisSettings

__all__ = ["RedisIndex", "RedisSettings", "namespace"]
