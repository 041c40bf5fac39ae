"""How long a web server's response may be reused."""

import pytest

from prefill_client.media.download import MAX_FRESH_S, fresh_s


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 60.0),
        ({"cache-control": "max-age=300"}, 300.0),
        ({"cache-control": 'public, MAX-AGE="300"'}, 300.0),
        ({"cache-control": "max-age=300, s-maxage=10"}, 10.0),
        ({"cache-control": "max-age=99999999999"}, MAX_FRESH_S),
        ({"cache-control": "max-age=soon"}, 0.0),
        ({"cache-control": "max-age=-1"}, 0.0),
        ({"cache-control": "no-cache, max-age=300"}, 0.0),
        ({"cache-control": "no-store, max-age=300"}, 0.0),
        ({"cache-control": "private, max-age=300"}, 0.0),
        ({"vary": "*"}, 0.0),
        ({"vary": "Accept-Encoding"}, 60.0),
    ],
)
def test_headers_decide_freshness(headers: dict[str, str], seconds: float) -> None:
    assert fresh_s(headers, 60.0) == seconds
