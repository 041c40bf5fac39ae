"""First on PYTHONPATH, it makes Pillow one built without WebP: the service reads such images, SGLang cannot."""

import sys

sys.modules["PIL._webp"] = None  # type: ignore[assignment]  # importing it raises ImportError
