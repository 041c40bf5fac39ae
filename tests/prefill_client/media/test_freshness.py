"""How long a web server's response may be reused."""

import pytest

from prefill_client.media.download import MAX_FRESH_S, fresh_s

PAST, LATER = "Sun, 06 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:51:07 GMT"
FUTURE = "Fri, 06 Nov 9994 08:49:37 GMT"


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
        ({"vary": "Accept, *"}, 0.0),
        ({"expires": PAST}, 0.0),
        ({"expires": "0"}, 0.0),
        ({"expires": "Sun, 06 Nov 1994 %s:49:37 GMT" % ("9" * 400)}, 0.0),
        ({"expires": FUTURE}, 0.0),
        ({"expires": FUTURE, "date": PAST}, MAX_FRESH_S),
        ({"expires": LATER, "date": PAST}, 90.0),
        ({"expires": "Sunday, 06-Nov-94 08:51:07 GMT", "date": "Sun Nov  6 08:49:37 1994"}, 90.0),
        ({"expires": FUTURE, "date": "a day"}, 0.0),
        ({"expires": PAST, "cache-control": "max-age=300"}, 300.0),
        ({"expires": FUTURE, "cache-control": "no-store"}, 0.0),
        ({"cache-control": "max-age=300", "age": "100"}, 200.0),
        ({"cache-control": "max-age=300", "age": "400"}, 0.0),
        ({"cache-control": "max-age=300", "age": "old"}, 300.0),
        ({"expires": LATER, "date": PAST, "age": "60"}, 30.0),
        ({"vary": "Accept-Encoding"}, 60.0),
    ],
)
def test_headers_decide_freshness(headers: dict[str, str], seconds: float) -> None:
    assert fresh_s(headers, 60.0) == seconds
