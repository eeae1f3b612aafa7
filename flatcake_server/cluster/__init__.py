"""Many nodes, one address space: who is there, who holds which prefix, and asking them for it.

Pure: `anchors` (which keys are published), `members` (the lease on a node id), `publisher` (what the directory is told),
`borrowed` (leases of other nodes held for local clients), `proof` (who knows the cluster's token). Doing: the directories
(`redis_directory`, `static_directory`), `peer_service` (what other nodes ask of us), `peers` (what we ask of them), `cluster`
(joins all of it). Writes are always local; a directory's word is a hint; a failure here is a shorter hit, never an error.
"""
