"""The way to a device: the system's OpenSSH, its keys, agent and `~/.ssh/config`; nothing of it is turned off."""
