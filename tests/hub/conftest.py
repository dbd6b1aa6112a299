from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from hub_fixtures import hub, no_secrets, patience  # noqa: F401 - fixtures
