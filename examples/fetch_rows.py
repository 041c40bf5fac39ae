"""Fetches an image's embedding rows as a numpy array: `python examples/fetch_rows.py photo.jpg [HOST:PORT]`.

Needs only the client, without torch. Start the server with `encoder-service serve --model FOLDER`.
"""

import sys

from prefill_client import BlockingClient, RowRequest

path, server = [*sys.argv[1:], "127.0.0.1:50051"][:2]
with BlockingClient.connect(server) as client:
    (image,) = client.submit([path])
    with client.fetch([RowRequest(image.digest)]) as outcomes:
        for rows in outcomes:
            numbers = rows.float32()
            print(
                f"{path}: {image.tokens} tokens, rows {numbers.shape} {rows.dtype}, mean {numbers.mean():.6f}"
            )
