"""The reference service refuses an encoder that would send it other rows than its checkpoint's."""

import json
import shutil
from pathlib import Path

from tests.processes import run, running
from tests.waiting import START_S


def test_an_encoder_with_another_image_processor_is_refused_with_both_fingerprints(
    checkpoint: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    settings = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps({**settings, "image_mean": [0.4, 0.5, 0.5]}))
    with running(checkpoint) as encoder:
        command = ("prefill-reference", "--model", other, "--encoder", encoder.endpoint)
        done = run(*command, "--listen", "127.0.0.1:0", timeout_s=START_S)
    assert done.returncode == 1, done.stderr
    assert "ModelMismatchError: the encoder serves another model: image processor" in done.stderr
