"""Full disks and a full /dev/shm: an error at start names the flag to change; later they do not stop the server."""

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from prefill_client import EncoderClient
from testing.photos import photo
from tests.calls import encoded
from tests.full_folder import in_full_folder
from tests.processes import SCRIPTS
from tests.waiting import PATIENCE_S, START_S


def serve(checkpoint: Path, folder: Path, listen: str, store_gib: float) -> list[str]:
    flags = ["--model", checkpoint, "--listen", listen, "--store-segment-dir", folder, "--devices", "cpu"]
    flags += ["--store-host-gib", store_gib]
    return [str(word) for word in (SCRIPTS / "encoder-service", "serve", *flags)]


def test_a_full_segment_folder_names_the_flag_to_change(checkpoint: Path, tmp_path: Path) -> None:
    command = serve(checkpoint, tmp_path, "127.0.0.1:0", store_gib=16 / 1024)
    result = subprocess.run(
        in_full_folder(tmp_path, 32, 15, command), capture_output=True, text=True, check=False
    )
    assert result.returncode == 2, result.stderr
    assert (
        f"does not fit into {tmp_path}, which has 0.01 GiB free of 0.03 GiB: lower --store-host-gib"
        in result.stderr
    )
    assert "Traceback" not in result.stderr


@pytest.mark.attack("a full disk or `/dev/shm`")
async def test_a_server_continues_with_a_full_folder_and_an_unwritable_log(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(
        "PYTHONUNBUFFERED", raising=False
    )  # with it, nothing is left for the end of the process
    folder, listen = tmp_path / "segments", f"unix:{tmp_path}/encoder.sock"
    folder.mkdir()
    command = in_full_folder(folder, 32, 18, serve(checkpoint, folder, listen, store_gib=16 / 1024))
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(command, stdout=full, stderr=full)
    try:
        async with await EncoderClient.connect(listen, timeout_s=START_S) as client:
            _fill(process, folder)
            assert shutil.disk_usage(_seen(process, folder)).free == 0
            for seed in range(3):
                await encoded(client, photo(256, 256, seed))
            [damaged] = await client.submit(
                [b"\xff\xd8\xff no image"], timeout_s=PATIENCE_S
            )  # writes a log line
            assert damaged.error is not None
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def _fill(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Fill the free space of the folder."""
    with open(_seen(process, folder) / "of others", "ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


def _seen(process: subprocess.Popen[bytes], folder: Path) -> Path:
    """Return the folder as the process sees it."""
    return Path(f"/proc/{process.pid}/root") / folder.relative_to("/")
