"""``ServerPolicies``: what a replay's server does beside evicting."""

from __future__ import annotations

from typing import Literal, NamedTuple

Admission = Literal["reserved", "expected", "known"]
"""When a request is admitted: the server's policies, and ``known``, which is ``expected`` with the true lengths."""
PausePolicy = Literal["none", "learnt", "known"]
"""Which conversations are kept and brought back: as if nobody returned, those that the server expects back by what
it has learnt, or those that the recording knows to come back, the next one first."""


class ServerPolicies(NamedTuple):
    """What a replay's server does beside evicting. By default it learns and foresees nothing."""

    admission: Admission = "reserved"
    pauses: PausePolicy = "none"
    loads_ahead: bool = False
    """Whether what waiting requests need is loaded before their turn."""

    @property
    def oracle(self) -> ServerPolicies:
        """The policies with what the recording knows in place of what the server learns."""
        return self._replace(
            admission="reserved" if self.admission == "reserved" else "known",
            pauses="none" if self.pauses == "none" else "known",
        )


KNOWS_NOTHING = ServerPolicies()
"""Those of a server that neither learns nor foresees anything."""
