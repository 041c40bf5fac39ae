"""Certificates in files: refusals at start, and changes of the files."""

import datetime
import os
import shutil
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from encoder_contract.certificates import Certificates, expirations
from encoder_contract.credentials import Credentials
from testing.certificates import Authority, Issued


@pytest.fixture
def issued(tmp_path: Path) -> Issued:
    """A server's certificate, and its authority's beside it as ca.pem."""
    authority = Authority()
    authority.write(tmp_path / "ca.pem")
    return authority.issue(tmp_path, "server", ["localhost"])


def test_unchanged_files_are_not_read_again(issued: Issued) -> None:
    certificates = Certificates(*issued)
    assert certificates.pem is certificates.pem
    assert certificates.pem.cert == Path(issued.cert).read_bytes()
    assert certificates.pem.ca == b""


def test_a_new_certificate_is_used_once_its_key_is_there_too(issued: Issued, tmp_path: Path) -> None:
    certificates = Certificates(*issued, ca=str(tmp_path / "ca.pem"))
    old = certificates.pem
    elsewhere = tmp_path / "new"
    elsewhere.mkdir()
    new = Authority().issue(elsewhere, "server", ["localhost"])
    os.replace(new.cert, issued.cert)
    assert certificates.pem is old  # its key is still the old one's
    os.replace(new.key, issued.key)
    assert certificates.pem.version > old.version
    assert certificates.pem.cert == Path(issued.cert).read_bytes() != old.cert
    assert certificates.pem.key == Path(issued.key).read_bytes() != old.key


@pytest.mark.parametrize("damage", ["cut", "missing", "another"])
def test_unusable_files_leave_the_old_ones_in_use(issued: Issued, tmp_path: Path, damage: str) -> None:
    ca = tmp_path / "ca.pem"
    certificates = Certificates(*issued, ca=str(ca))
    old = certificates.pem
    for path in (Path(issued.cert), ca):
        before = path.read_bytes()
        if damage == "cut":
            path.write_bytes(before[:100])
        elif damage == "missing":
            path.unlink()
        else:
            shutil.copy(issued.key, path)
        assert certificates.pem is old
        path.write_bytes(before)
        assert certificates.pem is old


def test_errors_in_certificate_files_name_the_files(issued: Issued, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    foreign = Authority().issue(other, "server", ["localhost"])
    with pytest.raises(
        ValueError, match=f"{issued.cert} and {foreign.key}: the key does not belong to the certificate"
    ):
        Certificates(issued.cert, foreign.key)
    with pytest.raises(ValueError, match=f"{tmp_path}: "):
        Certificates(*issued, ca=str(tmp_path))
    with pytest.raises(ValueError, match=f"{issued.key}: the file is not valid PEM"):
        Certificates(*issued, ca=issued.key)
    key = load_pem_private_key(Path(issued.key).read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password"))
    )
    with pytest.raises(ValueError, match="the key is encrypted"):
        Certificates(issued.cert, str(locked))


def test_the_expirations_of_a_chain_are_those_that_cryptography_reads(issued: Issued, tmp_path: Path) -> None:
    chain = Path(issued.cert).read_bytes() + (tmp_path / "ca.pem").read_bytes()
    expected = [each.not_valid_after_utc.timestamp() for each in x509.load_pem_x509_certificates(chain)]
    assert len(expected) == 2
    assert expirations(chain) == expected
    assert expirations(Path(issued.key).read_bytes()) == []


@pytest.mark.parametrize("year", [1999, 2049, 2050, 9999])
def test_the_expiration_of_a_certificate_has_two_forms_and_any_size(year: int) -> None:
    """Until 2049 the year has two digits, from 2050 on four. A long name makes sizes of several bytes."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x" * 60)] * 8)
    ends = datetime.datetime(year, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(ends.replace(year=1990)).not_valid_after(ends)
    pem = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    assert expirations(pem) == [ends.timestamp()]
    assert expirations(pem.replace(b" CERTIFICATE", b" X509 CERTIFICATE")) == [ends.timestamp()]


def test_incomplete_credentials_are_refused() -> None:
    assert Credentials().certificates() is None
    for given in ({"cert": "a"}, {"ca": "public", "key": "b"}):
        with pytest.raises(ValueError, match="together"):
            Credentials(**given).certificates()
    for given in ({"cert": "a", "key": "b"}, {"server_name": "encoder"}):
        with pytest.raises(ValueError, match="authorities"):
            Credentials(**given).certificates()
    public = Credentials(ca="public").certificates()
    assert public is not None
    assert public.pem.ca == b""
