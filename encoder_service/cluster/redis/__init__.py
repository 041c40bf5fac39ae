"""The index in Redis: which replica holds or encodes which embedding."""

from encoder_service.cluster.redis.index import RedisIndex
from encoder_service.cluster.redis.schema import namespace
from encoder_service.cluster.redis.session import RedisSettings

__all__ = ["RedisIndex", "RedisSettings", "namespace"]
