"""Fetches an image's embedding rows as a numpy array: `python examples/fetch_rows.py photo.jpg [HOST:PORT]`.

Needs only the client, without torch. Start the server with `encoder-service serve --model FOLDER`.
"""

import argparse

from prefill_client import BlockingClient, EncoderError, RowRequest

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("image")
parser.add_argument("server", nargs="?", default="127.0.0.1:50051", metavar="HOST:PORT")
given = parser.parse_args()
try:
    with BlockingClient.connect(given.server) as client:
        (image,) = client.submit([given.image])
        if image.error:  # an image that cannot be encoded fails alone: the call itself succeeds
            raise SystemExit(f"{given.image}: {image.error}")
        with client.fetch([RowRequest(image.digest)]) as outcomes:
            for rows in outcomes:
                numbers = rows.float32()  # raises `rows.error`, if there is one
                shape, mean = numbers.shape, numbers.mean()
                print(f"{given.image}: {image.tokens} tokens, rows {shape} {rows.dtype}, mean {mean:.6f}")
except (EncoderError, OSError, ValueError) as error:
    raise SystemExit(str(error)) from None
