"""What ssh says when it cannot bring us to another machine."""

from __future__ import annotations

from shoal.net.pattern import Pattern, Weight

SSH = (
    Pattern(
        "ssh.denied",
        Weight.CAUSE,
        ("Permission denied (publickey",),
        regex=r"(?:(?P<host>\S+@\S+): )?Permission denied \(publickey",
        cause="{host} does not let us in: the user is wrong, or none of our keys is known there",
        fix="ssh-copy-id {host}; a key with a passphrase must be in the agent: ssh-add",
        check="reach.host",
    ),
    Pattern(
        "ssh.key-changed",
        Weight.CAUSE,
        ("ost key for ",),
        regex=r"[Hh]ost key for (?P<host>\S+) has changed",
        cause="the machine at {host} shows another key than last time: it was installed anew, or it is another "
        "machine. Ask whose it is before you trust it",
        fix="ssh-keygen -R {host}; then: ssh {host}, and compare the fingerprint it asks about",
        check="reach.host",
        covers=("ssh.key-unknown",),
    ),
    Pattern(
        "ssh.key-unknown",
        Weight.CAUSE,
        ("host key is known for", "Host key verification failed"),
        regex=r"host key is known for (?P<host>\S+)|Host key verification failed",
        cause="we were never connected to {host} by this name, and ssh may not ask here whether to trust its key",
        fix="connect once by hand, compare the key and say yes: ssh {host}",
        check="reach.host",
    ),
    Pattern(
        "ssh.refused",
        Weight.CAUSE,
        ("ssh: connect to host",),
        regex=r"connect to host (?P<host>\S+) port (?P<port>\d+): Connection refused",
        cause="{host} is there, but no SSH server listens on its port {port}",
        fix="on that machine: sudo apt install openssh-server; sudo systemctl enable --now ssh",
        check="reach.host",
    ),
    Pattern(
        "ssh.timeout",
        Weight.CAUSE,
        ("ssh: connect to host",),
        regex=r"to host (?P<host>\S+) port (?P<port>\d+): (?:(?:Connection|Operation) timed out|No route to host)",
        cause="nothing comes back from {host}: it is off or asleep, on another network, or a firewall drops what we "
        "send",
        fix="wake it and try: ping -c 3 {host}; on that machine: sudo ufw allow {port}/tcp",
        check="reach.host",
    ),
    Pattern(
        "ssh.name",
        Weight.CAUSE,
        ("Could not resolve hostname",),
        regex=r"Could not resolve hostname (?P<host>[^:]+):",
        cause="neither the ssh configuration nor the name service knows {host}",
        fix="use its address, or add it to ~/.ssh/config: Host {host} / HostName ADDRESS",
        check="reach.host",
    ),
)
