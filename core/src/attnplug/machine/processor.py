"""What the host's processor is: some ways of torch's are the faster ones on one kind and the slower ones on another."""

from __future__ import annotations

import platform

IS_ARM = platform.machine() in ("aarch64", "arm64")
