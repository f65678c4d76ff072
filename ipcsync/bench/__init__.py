"""``ipcsync bench``: measures this machine, ours and its peers in one run. Loaded by nothing but that command."""
