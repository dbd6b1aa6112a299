from __future__ import annotations

from helpers.hub_fixtures import hub, no_secrets  # noqa: F401 - fixtures
