"""Which alerts the running stack provokes, and why it does not provoke the others."""

import re
from pathlib import Path

import yaml

from testing.images import build

BY_CASES = "promtool plays its case in rules.test.yml; "
NOT_PROVOKED = {
    "EncoderGone": "compose finds replicas by name, so a lost one is no target; EncoderReplicaLost fires instead",
    "EncoderRestarting": BY_CASES + "three restarts of a healthy server take minutes each",
    "EncoderDeviceFailing": BY_CASES + "three ends of a device's process within minutes",
    "EncoderQueueFull": BY_CASES
    + "a queue that stays full for a minute needs more load than two cores can make",
    "EncoderRefusing": BY_CASES + "as EncoderQueueFull",
    "EncoderFailing": BY_CASES + "needs a defect",
    "EncoderSlow": BY_CASES + "needs minutes of overload",
    "EncoderIndexSlow": BY_CASES + "needs a slow network",
    "EncoderLoopLag": BY_CASES + "needs minutes of a blocked event loop",
    "EncoderIdleWithQueue": BY_CASES + "needs a defect",
    "EncoderPinsLeaking": BY_CASES + "needs a defect",
    "EncoderStorePinned": BY_CASES + "needs readers that stand still",
    "EncoderSharedMemoryLow": BY_CASES + "needs a full /dev/shm beside a store that is reserved",
    "EncoderFilesLow": BY_CASES + "needs thousands of connections",
    "EncoderCertificateExpires": BY_CASES + "needs a certificate that ends soon",
    "EncoderRendersLost": BY_CASES + "needs a render server, engines and a service that forgets",
    "EncoderLostToGateway": BY_CASES + "this stack has no gateway",
}


def test_every_alert_is_provoked_or_listed() -> None:
    (group,) = yaml.safe_load((build.DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    alerts = {rule["alert"] for rule in group["rules"]}
    text = (Path(__file__).parent / "test_compose.py").read_text()
    provoked = set(re.findall(r'"(Encoder\w+)" in stack\.alerts\(\)', text))
    assert provoked | NOT_PROVOKED.keys() == alerts
    assert not provoked & NOT_PROVOKED.keys()
