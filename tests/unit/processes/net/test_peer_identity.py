"""Whom a certificate is for."""

import pytest

from jdag.errors import JoinError
from jdag.processes.net.peer_identity import check_identity, names_in, names_of
from tests.tools.error_texts import fails_with

HOST = "node7.example.org"


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("ps0", None),
        ("ps0", HOST),
        ("PS0", HOST),
        (HOST, HOST),
        ("*.example.org", HOST),
        ("10.0.0.1", "10.0.0.1"),
        ("0:0:0:0:0:0:0:1", "::1"),
    ],
)
def test_a_certificate_of_the_worker_or_of_its_host_will_do(name: str, host: str):
    check_identity(("somebody", name), "ps0", host)


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("ps1", HOST),
        (HOST, None),
        ("node8.example.org", HOST),
        ("example.org", HOST),
        ("*.org", HOST),
        ("*.example.org", "example.org"),
        ("*", HOST),
        ("*.", "localhost"),
        ("10.0.0.2", "10.0.0.1"),
    ],
)
def test_one_of_another_is_refused_and_named(name: str, host: str):
    with pytest.raises(JoinError) as caught:
        check_identity((name, name), "ps0", host)
    assert f"joins as worker 'ps0' has a certificate for {name}; expected" in str(
        caught.value
    )
    assert str(caught.value).endswith("for ps0" + (f" or {host}" if host else ""))


def test_without_names_it_is_nobodys_and_without_tls_there_is_none():
    with fails_with(JoinError, "processes.a_certificate_for_nobody"):
        check_identity((), "ps0", HOST)
    check_identity(None, "ps0", HOST)


def test_names_are_read_as_python_and_as_grpc_have_them():
    subject = ((("countryName", "XX"),), (("commonName", "ps0"),))
    others = (("DNS", "ps0.example.org"), ("IP Address", "10.0.0.1"))
    names = ["ps0", "ps0.example.org", "10.0.0.1"]
    assert list(names_in({"subject": subject, "subjectAltName": others})) == names
    assert list(names_in({})) == list(names_in(None)) == []

    keys = {
        "x509_common_name": [b"ps0"],
        "x509_subject_alternative_name": [b"ps0.example.org", b"10.0.0.1"],
    }
    tls = {"transport_security_type": [b"ssl"]}
    assert list(names_of({**tls, **keys}) or ()) == names
    assert list(names_of(tls) or ("none",)) == ["none"]
    assert names_of(tls) == []
    assert names_of({"transport_security_type": [b"insecure"]}) is None
    assert names_of({}) is None
