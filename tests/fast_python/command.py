"""What the command runs, in a bare interpreter: see `tests/fast_python/__init__.py`."""

import json
import os
import signal
import socket
import sys

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def needs_real_python(arguments: list[str], root: str) -> bool:
    """Return whether options are unknown, or another package than the checkout's is on the path."""
    if not arguments or (arguments[0][0] == "-" and arguments[0] not in ("-c", "-m")):
        return True
    package = f"{root}/lightning_hetero"
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        found = os.path.join(folder, "lightning_hetero")
        if os.path.isdir(found):
            return not os.path.samefile(found, package)
    return False


def open_descriptors(apart_from: int) -> list[int]:
    """Return all that a new interpreter would inherit."""
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return sorted(n for n in found if n != apart_from and is_inherited(n))


def is_inherited(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False  # It was the listing's own.


def main() -> None:
    folder, python, root, *arguments = sys.argv[1:]
    given = arguments
    while arguments and arguments[0] in ("-u", "-B"):
        arguments = arguments[1:]
    if needs_real_python(arguments, root):
        os.execv(python, [python, *given])
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(f"{folder}/socket")
    descriptors = open_descriptors(apart_from=server.fileno())
    request = {
        "arguments": arguments,
        "is_unbuffered": "-u" in given[: len(given) - len(arguments)],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "descriptors": descriptors,
    }
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    socket.send_fds(server, [json.dumps(request).encode()], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)  # Pipes end with the fork.
    answer = server.recv(16)
    code = os.waitstatus_to_exitcode(int(answer)) if answer else 1
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
