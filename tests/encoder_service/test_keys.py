"""Addresses: pinned by golden vectors, changed by every field."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from encoder_contract.digest import content_digest
from encoder_service.keys import Recipe

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
