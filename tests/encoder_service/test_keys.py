"""Addresses: pinned by golden vectors, changed by every field."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from encoder_contract.digest import content_digest
from encoder_contract.producer import EngineKey, Producer
from encoder_service.keys import Recipe, put_key

RECIPE = Recipe(model=b"m" * 32, processor=b"p" * 32, dtype="bfloat16")

GOLDEN = {
    (): "c66864f5c7de91ef6cbf0b01e6426220f7cd8aba6a67ca30ca7e32b776faa2f1",
    (("min_pixels", 65536),): "4ff35fa5ae3d672af189d2c51ae931579bb7262b94ed0c63a63a4acffce5b9ac",
    (("max_pixels", 65536),): "ee08b3ca2c5aea425a0026e5d341fc5f36f07418da6b971deb6235e61c1b4452",
    (("salt", b"tenant"),): "b022ad05ec516da9b870dfd9db8efa1bc7362d3125811fdcd8ba3dbe30fd82c5",
}


def test_golden_addresses_never_change() -> None:
    found = {fields: RECIPE.key(bytes(range(32)), **dict(fields)).address.hex() for fields in GOLDEN}
    assert found == GOLDEN


SOURCE_KEYS = {
    b"": "cfe3459d4ec81239239d6b07aed22a0d3716dad975f1ec415115f6c73201424c",
    b"tenant": "f3c49c727be29605e3f61b420a8e284e8812e9c8d8db960ff68a76e20f1e8c17",
}


def test_golden_source_keys_never_change() -> None:
    found = {salt: RECIPE.key(bytes(range(32)), salt=salt).source_key.hex() for salt in SOURCE_KEYS}
    assert found == SOURCE_KEYS


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=64), st.binary(max_size=64))
def test_no_digest_names_the_file_of_a_tenant(digest: bytes, salt: bytes, other: bytes) -> None:
    """A caller that uses the source key of a tenant's file as a digest does not get the file."""
    key = RECIPE.key(digest, salt=salt).source_key
    assert key != digest
    assert RECIPE.key(key).source_key != key
    plain = content_digest(digest + salt)  # what a caller without a salt can name
    assert RECIPE.key(plain).source_key != key
    assert (RECIPE.key(digest, salt=other).source_key == key) == (other == salt)


digests = st.binary(min_size=32, max_size=32)
fields = st.fixed_dictionaries(
    {
        "content": digests,
        "model": digests,
        "processor": digests,
        "dtype": st.sampled_from(["bfloat16", "float16", "float32"]),
        "min_pixels": st.integers(0, 2**40),
        "max_pixels": st.integers(0, 2**40),
        "salt": st.binary(max_size=64),
    }
)


def address(of: dict[str, Any]) -> bytes:
    recipe = replace(RECIPE, model=of["model"], processor=of["processor"], dtype=of["dtype"])
    return recipe.key(of["content"], of["min_pixels"], of["max_pixels"], of["salt"]).address


@given(fields, fields)
def test_changing_any_one_field_changes_the_address(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in one:
        changed = {**one, name: other[name]}
        assert (address(changed) == address(one)) == (changed == one)


PRODUCER = Producer(b"model", b"weights", b"processor", "bfloat16", "an engine 1.0")
PUT = {
    "digest": "6200ff6bf04b67b74526cda7a14e46cb90cbb28c98411e29a1f5b3a42eb8ffc7",
    "engine key": "743c4dcec672af54d3372377a252d800066084def442161699214a1e71866075",
}


def test_golden_addresses_of_rows_that_were_put_never_change() -> None:
    names = {"digest": bytes(range(32)), "engine key": EngineKey("vllm", b"key")}
    assert {how: put_key(PRODUCER, name).address.hex() for how, name in names.items()} == PUT


texts = st.text("abc", min_size=1, max_size=4)
bits = st.binary(min_size=1, max_size=4)
producers = st.builds(Producer, bits, bits, bits, texts, texts)
names = st.one_of(digests, st.builds(EngineKey, texts, bits))
variants = st.tuples(st.integers(0, 3), st.integers(0, 3), st.binary(max_size=2))


@given(producers, producers, names, names, variants, variants)
def test_put_rows_share_an_address_only_if_all_fields_are_equal(
    producer: Producer, other: Producer, name: Any, other_name: Any, variant: Any, other_variant: Any
) -> None:
    one, two = put_key(producer, name, *variant), put_key(other, other_name, *other_variant)
    equal = (producer, name, variant) == (other, other_name, other_variant)
    assert (one.address == two.address) == equal
    assert put_key(producer, name, *variant).address == one.address


@given(producers, names)
def test_put_rows_never_share_an_address_with_the_tower_or_a_file(producer: Producer, name: Any) -> None:
    put = put_key(producer, name)
    digest = name if isinstance(name, bytes) else b"d" * 32
    recipe = Recipe(producer.model, producer.processor, producer.dtype)
    submitted = recipe.key(digest)
    assert put.address != submitted.address
    assert put.source_key != submitted.source_key


@given(st.text("ab", min_size=1, max_size=3), st.binary(min_size=1, max_size=3))
def test_an_engines_key_is_no_digest_and_its_scheme_is_not_part_of_it(scheme: str, key: bytes) -> None:
    padded = (scheme.encode() + key).ljust(32, b"\0")
    assert put_key(PRODUCER, EngineKey(scheme, key)).address != put_key(PRODUCER, padded).address
    joined = EngineKey(scheme + "a", key)
    assert put_key(PRODUCER, joined).address != put_key(PRODUCER, EngineKey(scheme, b"a" + key)).address
