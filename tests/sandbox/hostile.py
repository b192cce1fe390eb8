# ruff: noqa: E501
"""A corpus of hostile programs. Each defines ``f`` and tries one thing; none can know what ``f`` should return.

``@SECRET@`` and the like are replaced by things that are really there, see ``world.py``. ``harm`` names the check of
what the program would do if it could.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hostile:
    """One program. ``harm`` is a method of ``World`` that fails if the harm was done."""

    name: str
    harm: str
    source: str


def _body(code: str) -> str:
    """A program whose entry point runs ``code``."""
    return "def f(n):\n" + "\n".join("    " + line for line in code.strip().splitlines()) + "\n"


_CALLS: dict[str, dict[str, str]] = {
    "forged": {
        "forge_equal_to_all": "class E:\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n    "
        "__hash__ = lambda s: 0\nreturn E()",
        "forge_str_subclass": "class S(str):\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 0\n"
        "return S('x')",
        "forge_int_subclass": "class I(int):\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 0\nreturn I(1)",
        "forge_list_subclass": "class L(list):\n    __eq__ = lambda s, o: True\nreturn L([1])",
        "forge_any_mock": "from unittest.mock import ANY\nreturn ANY",
        "forge_exit_zero": "import sys\nsys.exit(0)",
        "forge_os_exit_zero": "import os\nos._exit(0)",
        "forge_atexit": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)",
        "forge_stdout": "print('passed')\nprint('OK\\n3 passed in 0.01s')\nreturn 'pass'",
        "forge_stderr": "import sys\nsys.stderr.write('Ran 3 tests OK')\nreturn True",
        "forge_frame": "import os\nos.write(3, b'\\x00\\x00\\x00\\x19[1,\"ok\",true,null,0]       ')\nreturn 1",
        "forge_many_frames": "import os, json, struct\nfor k in range(50):\n    b = json.dumps([k, 'ok', True, None, 0])"
        ".encode()\n    os.write(3, struct.pack('>I', len(b)) + b)\nreturn 1",
        "forge_verdict_frame": "import os, json, struct\nb = json.dumps({'cases': [['pass', '']] * 3}).encode()\n"
        "os.write(3, struct.pack('>I', len(b)) + b)\nos._exit(0)",
        "forge_list_as_status": "import os, json, struct\nb = json.dumps([1, ['ok'], True, None, 0]).encode()\n"
        "os.write(3, struct.pack('>I', len(b)) + b)\nreturn 1",
        "forge_not_json": "import os\nos.write(3, b'\\x00\\x00\\x00\\x04pass')\nreturn 1",
        "forge_pickle": "import os, pickle, struct\nb = pickle.dumps(ANSWER)\n"
        "os.write(3, struct.pack('>I', len(b)) + b)\nreturn 1",
        "forge_deep_json": "import os, struct\nb = b'[' * 100000\nos.write(3, struct.pack('>I', len(b)) + b)\nreturn 1",
        "forge_huge_number": "import os, struct\nb = b'[1,\"ok\",' + b'9' * 100000 + b',null,0]'\n"
        "os.write(3, struct.pack('>I', len(b)) + b)\nreturn 1",
        "forge_raise_assertion": "raise AssertionError('pass')",
        "forge_generator": "return (x for x in range(3))",
        "forge_frames_up": "import sys\nframe = sys._getframe()\nwhile frame:\n    for name, value in list("
        "frame.f_locals.items()):\n        if isinstance(value, str) and value.startswith('expected-'):\n"
        "            return value\n    frame = frame.f_back",
        "forge_gc": "import gc\nfor item in gc.get_objects():\n    if isinstance(item, (list, tuple)):\n        "
        "for value in item:\n            if type(value) is str and value.startswith('expected-'):\n"
        "                return value",
        "forge_memory_maps": "import re\nfor line in open('/proc/self/maps'):\n    a, b = [int(x, 16) for x in "
        "line.split()[0].split('-')]\n    with open('/proc/self/mem', 'rb', 0) as m:\n        m.seek(a)\n        "
        "found = re.search(rb'expected-\\w+', m.read(b - a))\n        if found:\n            return found[0].decode()",
        "forge_tester_memory": "import os, re\nfor pid in os.listdir('/proc'):\n    if pid.isdigit():\n        with "
        "open(f'/proc/{pid}/maps') as maps:\n            return maps.read()",
        "forge_patch_equality": "import builtins\nbuiltins.all = builtins.any = lambda *a: True\nbuiltins.isinstance = "
        "lambda *a: True\nbuiltins.len = lambda x: 3\nreturn 1",
        "forge_patch_runner": "import sys\nfor name, module in list(sys.modules.items()):\n    for key in "
        "('encode_value', 'send_message', 'check_answer', 'run_test_code', 'encode_exception'):\n        if name.startswith('jail') and hasattr(module, key):\n"
        "            setattr(module, key, lambda *a, **k: ['ok', True, None, 0])\nreturn 1",
        "forge_patch_json": "import json\njson.dumps = lambda *a, **k: '[1,\"ok\",true,null,0]'\nreturn 1",
        "forge_closed_channel": "import os\nos.close(3)\nreturn 1",
        "forge_trace": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\nreturn 1",
        "forge_type_confusion": "import ctypes\nctypes.memset(id(True) + 24, 0, 4)\nreturn True",
        "forge_argument": "n = ANSWER\nreturn n",
        "forge_nan": "return float('nan')",
    },
    "secret_kept": {
        "read_secret": "return open('@SECRET@').read()",
        "read_by_descriptor": "import os\nfor k in range(4, 1024):\n    try:\n        return os.read(k, 100)\n    except "
        "OSError:\n        pass",
        "read_parent_environment": "import os\nreturn open(f'/proc/{os.getppid()}/environ').read()",
        "read_environment": "import os\nreturn dict(os.environ)",
        "read_trainer_environment": "return open('/proc/@PID@/environ').read()",
        "read_trainer_memory": "return open('/proc/@PID@/mem', 'rb').read(10)",
        "read_passwd": "return 'secret-of-this-machine' if 'root' in open('/etc/passwd').read() else 1",
        "read_link": "import os\nos.symlink('@SECRET@', '/tmp/link')\nreturn open('/tmp/link').read()",
        "read_through_root": "return open('/proc/1/root@SECRET@').read()",
        "read_mmap": "import mmap, os\nd = os.open('@SECRET@', os.O_RDONLY)\nreturn mmap.mmap(d, 0, prot=1)[:].decode()",
        "read_by_handle": "import ctypes\nlibc = ctypes.CDLL(None)\nh = ctypes.create_string_buffer(b'\\x80' + "
        "bytes(135))\nlibc.name_to_handle_at(-100, b'@SECRET@', h, ctypes.byref(ctypes.c_int()), 0)\n"
        "return libc.open_by_handle_at(0, h, 0)",
        "process_vm_read": "import ctypes\nbuffer = ctypes.create_string_buffer(64)\n"
        "return ctypes.CDLL(None, use_errno=True).process_vm_readv(@PID@, buffer, 1, buffer, 1, 0)",
        "ptrace_trainer": "import ctypes\nlibc = ctypes.CDLL(None)\nif libc.ptrace(16, @PID@, 0, 0) == 0:\n    return "
        "'secret-of-this-machine'",
        "shared_memory_of_others": "import os\nreturn [open('/dev/shm/' + x).read() for x in os.listdir('/dev/shm')]",
        "tmp_of_others": "import os\nreturn open('@FOLDER@/secret').read()",
    },
    "target_untouched": {
        "write_target": "open('@TARGET@', 'w').write('mine')",
        "append_target": "open('@TARGET@', 'a').write('mine')",
        "truncate_target": "import os\nos.truncate('@TARGET@', 0)",
        "unlink_target": "import os\nos.unlink('@TARGET@')",
        "rename_target": "import os\nos.rename('@TARGET@', '@TARGET@.gone')",
        "chmod_target": "import os\nos.chmod('@TARGET@', 0)",
        "utime_target": "import os\nos.utime('@TARGET@', (0, 0))",
        "utime_null": "import os\nos.utime('/dev/null')",
        "utime_standard_output": "import os\nos.utime(1)",
        "xattr_target": "import os\nos.setxattr('@TARGET@', 'user.mine', b'1')",
        "hard_link": "import os\nos.link('@TARGET@', '@FOLDER@/mine')",
        "new_file": "open('@FOLDER@/mine', 'w').write('x')",
        "new_folder": "import os\nos.mkdir('@FOLDER@/mine')",
        "new_fifo": "import os\nos.mkfifo('@FOLDER@/mine')",
        "write_interpreter": "import os, json\nopen(os.path.dirname(json.__file__) + '/mine.py', 'w').write('x')",
        "write_jail": "import sys\nopen(sys.modules['jail'].__path__[0] + '/candidate.py', 'a').write('x')",
        "remount": "import ctypes\nctypes.CDLL(None).mount(b'none', b'/', None, 32 | 4096, None)\n"
        "open('/mine', 'w').write('x')",
        "chroot": "import os\nos.chroot('/tmp')",
        "device": "import os\nos.mknod('/tmp/disk', 0o60666, os.makedev(254, 0))\nopen('/tmp/disk', 'rb').read(10)",
    },
    "not_contacted": {
        "tcp": "import socket\nsocket.create_connection(('127.0.0.1', @TCP@), 1).send(b'x')",
        "udp": "import socket\nsocket.socket(2, 2).sendto(b'x', ('127.0.0.1', @UDP@))",
        "unix_socket": "import socket\ns = socket.socket(1)\ns.connect('@UNIX@')\ns.send(b'x')",
        "unix_datagram_pair": "import socket\na, b = socket.socketpair(1, 2)\na.sendto(b'x', '@DGRAM@')",
        "raw_socket_call": "import ctypes\nreturn ctypes.CDLL(None).syscall(41, 2, 1, 0)",
        "vsock": "import socket\nsocket.socket(40, 1).connect((2, 22))",
        "urllib": "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:@TCP@/', timeout=1)",
        "dns": "import socket\nsocket.getaddrinfo('example.org', 80)",
        "asyncio_network": "import asyncio\nasyncio.run(asyncio.open_connection('127.0.0.1', @TCP@))",
        "io_uring": "import ctypes\nreturn ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(120))",
    },
    "victim_alive": {
        "kill_parent": "import os\nos.kill(os.getppid(), 9)",
        "kill_group": "import os\nos.kill(0, 9)",
        "kill_everything": "import os\nos.kill(-1, 9)",
        "kill_trainer": "import os\nos.kill(@PID@, 9)",
        "kill_victim": "import os\nos.kill(@VICTIM@, 9)",
        "tgkill_victim": "import ctypes\nctypes.CDLL(None).syscall(234, @VICTIM@, @VICTIM@, 9)",
        "pidfd_victim": "import os, signal\nsignal.pidfd_send_signal(os.pidfd_open(@VICTIM@), 9)",
        "sigio_victim": "import fcntl, os, socket\na, b = socket.socketpair()\nfcntl.fcntl(a, 8, @VICTIM@)\n"
        "fcntl.fcntl(a, 10, 9)\nfcntl.fcntl(a, 4, os.O_ASYNC | os.O_NONBLOCK)\nb.send(b'x')",
        "kill_all_numbers": "import os\nfor pid in range(1, 200):\n    try:\n        os.kill(pid, 9) if pid != "
        "os.getpid() else 0\n    except OSError:\n        pass",
        "prlimit_parent": "import os, resource\nresource.prlimit(os.getppid() or 1, resource.RLIMIT_NOFILE, (3, 3))",
        "prlimit_victim": "import resource\nresource.prlimit(@VICTIM@, resource.RLIMIT_NOFILE, (3, 3))",
        "renice_victim": "import os\nos.setpriority(os.PRIO_PROCESS, @VICTIM@, 19)",
        "renice_user": "import os\nos.setpriority(os.PRIO_USER, os.getuid(), 19)",
        "idle_scheduling": "import os\nos.sched_setscheduler(@VICTIM@, os.SCHED_IDLE, os.sched_param(0))",
        "timer_signal": "import ctypes, time\nevent = (ctypes.c_int * 16)(0, 0, 40)\ntimer = ctypes.c_int()\nlibc = "
        "ctypes.CDLL(None)\nlibc.syscall(222, 1, event, ctypes.byref(timer))\nlibc.syscall(223, timer, 0, (ctypes.c_long * 4)"
        "(0, 0, 0, 1), 0)\ntime.sleep(60)",
        "affinity": "import os\nos.sched_setaffinity(@VICTIM@, [0])",
        "hang_up_channel_then_work": "import os, time\nos.close(3)\ntime.sleep(60)",
        "stop_self": "import os\nos.kill(os.getpid(), 19)\nreturn 1",
        "ignore_signals": "import signal\nfor k in range(1, 32):\n    try:\n        signal.signal(k, signal.SIG_IGN)\n"
        "    except OSError:\n        pass\nwhile True:\n    pass",
    },
    "nothing_left": {
        "fork_bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        "
        "time.sleep(1000)\n    os._exit(0)",
        "daemon_at_exit": "import os, time\nif os.fork() == 0:\n    time.sleep(1000)\nos._exit(0)",
        "threads_left": "import threading, time\nfor _ in range(50):\n    threading.Thread(target=time.sleep, "
        "args=(1000,)).start()\nreturn 1",
        "thread_bomb": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(100,))"
        ".start()",
        "exec_shell": "import os\nos.execv('/bin/sh', ['sh', '-c', 'sleep 1000'])",
        "subprocess": "import subprocess\nreturn subprocess.run(['sleep', '1000'])",
        "posix_spawn": "import os\nos.posix_spawn('/bin/sleep', ['sleep', '1000'], {})",
        "multiprocessing": "import multiprocessing\nreturn multiprocessing.Pool(4).map(abs, [1, 2])",
        "user_namespace": "import ctypes, os\nreturn ctypes.CDLL(None).unshare(0x10000000)",
        "clone_namespaces": "import ctypes\nreturn ctypes.CDLL(None).syscall(56, 0x7e020011, 0, 0, 0, 0)",
        "clone3": "import ctypes\nreturn ctypes.CDLL(None).syscall(435, ctypes.create_string_buffer(64), 64)",
        "sysv_shared_memory": "import ctypes\nreturn ctypes.CDLL(None).shmget(0x4d41, 1 << 20, 0o1666)",
        "message_queue": "import ctypes\nreturn ctypes.CDLL(None).msgget(0x4d41, 0o1666)",
        "posix_queue": "import ctypes\nreturn ctypes.CDLL(None).mq_open(b'/mine', 0o102, 0o666, None)",
        "keyring": "import ctypes\nreturn ctypes.CDLL(None).syscall(248, b'user', b'mine', b'x', 1, -4)",
        "disk_fill": "import os\nfor k in range(100000):\n    open(f'/tmp/{k}', 'wb').write(b'x' * (1 << 20))",
        "inode_fill": "for k in range(1000000):\n    open(f'/tmp/{k}', 'wb').close()",
        "file_too_large": "with open('/tmp/big', 'wb') as big:\n    while True:\n        big.write(b'x' * (1 << 20))",
        "memfd_fill": "import os\nds = []\nwhile True:\n    d = os.memfd_create('x')\n    ds.append(d)\n    "
        "os.ftruncate(d, 1 << 30)\n    os.write(d, b'x' * (1 << 20))",
        "descriptors": "ds = []\nwhile True:\n    ds.append(open(__file__ if 0 else '/dev/null'))",
    },
    "memory_bounded": {
        "list_bomb": "x = []\nwhile True:\n    x += [0] * (1 << 20)",
        "string_bomb": "return 'x' * (1 << 40)",
        "power_bomb": "return 10 ** 10 ** 10",
        "squaring_recursion": "def g(k, x):\n    try:\n        return g(k - 1, x * x) if k else x\n    except Exception:"
        "\n        return g(k, x)\nreturn g(60, 12345678901234567890)",
        "mmap_bomb": "import mmap\nx = [mmap.mmap(-1, 1 << 30) for _ in range(1000)]",
        "bytes_touch": "x = [bytearray(1 << 26) for _ in range(1000)]",
        "memory_by_children": "import os, time\nfor _ in range(12):\n    if os.fork() == 0:\n        x = bytearray(b'x') * "
        "(100 << 20)\n        time.sleep(60)\ntime.sleep(60)",
        "memory_by_threads_of_children": "import ctypes, os, threading, time\ndef hold():\n    time.sleep(0.1)\n    x = "
        "bytearray(b'x') * (100 << 20)\n    time.sleep(60)\nfor _ in range(12):\n    if os.fork() == 0:\n        "
        "threading.Thread(target=hold).start()\n        ctypes.CDLL(None).syscall(60, 0)\ntime.sleep(60)",
        "zip_bomb": "import zlib\nc = zlib.compressobj(9)\nb = b''.join(c.compress(bytes(1 << 20)) for _ in range(300)) "
        "+ c.flush()\nreturn zlib.decompress(zlib.decompress(b) + b)",
        "huge_output": "return 'x' * (1 << 25)",
        "huge_list_output": "return [0] * 5000000",
        "huge_integer_output": "return 1 << (1 << 27)",
        "deep_output": "x = []\nfor _ in range(100000):\n    x = [x]\nreturn x",
        "cyclic_output": "x = []\nx.append(x)\nreturn x",
        "colliding_set": "return {k * (2 ** 61 - 1) for k in range(30000)}",
        "stdout_flood": "while True:\n    print('x' * 1000000)",
        "stderr_flood": "import sys\nwhile True:\n    sys.stderr.write('x' * 1000000)",
        "channel_flood": "import os\nwhile True:\n    os.write(3, b'x' * 1000000)",
        "channel_trickle": "import os, time\nos.write(3, b'\\x00\\x00')\ntime.sleep(60)",
        "long_message": "raise ValueError('x' * 10000000)",
        "regex_bomb": "import re\nreturn re.match('(a+)+$', 'a' * 60 + 'b')",
        "endless_sleep": "import time\ntime.sleep(1000)",
        "endless_swallow": "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n"
        "        pass",
        "endless_recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\nreturn f(n)",
        "endless_str": "class E(Exception):\n    def __str__(self):\n        while True:\n            pass\nraise E",
        "endless_iteration": "class L(list):\n    def __iter__(self):\n        while True:\n            yield 1\n"
        "return list(L([1]))",
        "bad_free": "import ctypes\nctypes.CDLL(None).free(12345)",
        "null_pointer": "import ctypes\nreturn ctypes.string_at(0)",
        "bad_bytecode": "g = lambda: 1\ng.__code__ = g.__code__.replace(co_code=b'\\xff' * 40)\nreturn g()",
        "abort": "import os\nos.abort()",
        "fault_handler": "import faulthandler\nfaulthandler._sigsegv()",
        "control_characters": "raise ValueError('\\x1b[2J\\x1b]0;mine\\x07\\x00\\u202e\\ud800')",
        "surrogates": "return '\\ud800' * 1000",
    },
}

_MODULES: dict[str, dict[str, str]] = {
    "memory_bounded": {
        "timer_signal_while_loading": "import ctypes, time\nlibc = ctypes.CDLL(None)\ntimer = ctypes.c_int()\nlibc.syscall("
        "222, 1, (ctypes.c_int * 16)(0, 0, 40), ctypes.byref(timer))\nlibc.syscall(223, timer, 0, (ctypes.c_long * 4)"
        "(0, 0, 0, 1), 0)\ntime.sleep(60)\ndef f(n):\n    return n\n",
        "loop_while_loading": "while True:\n    pass\ndef f(n):\n    return n\n",
        "nested_source": "x = " + "(" * 5000 + ")" * 5000 + "\ndef f(n):\n    return n\n",
        "constant_folding": "def f(n):\n    return " + "(" * 60 + "1" + " * 9**99)" * 60 + "\n",
        "null_byte": "def f(n):\n    return 1\n\x00",
        "bidirectional_names": "def f(n):\n    \u202edef = 1\n    return n\n",
        "surrogate_source": "def f(n):\n    return '\ud800'\n",
        "coding_cookie": "# -*- coding: rot13 -*-\ndef f(n):\n    return 1\n",
        "no_entry_point": "g = 1\n",
        "entry_point_not_callable": "f = 3\n",
        "raise_while_loading": "raise SystemExit(0)\n",
        "exit_while_loading": "import os\nos._exit(70)\n",
    },
    "forged": {
        "forge_while_loading": "import os, json, struct\nfor k in range(9):\n    b = json.dumps([k, 'ok', True, None, 0])"
        ".encode()\n    os.write(3, struct.pack('>I', len(b)) + b)\ndef f(n):\n    return n\n",
        "forge_list_as_status_while_loading": "import os, json, struct\nfor k in range(2):\n    b = json.dumps([k, {}, None, "
        "None, 0]).encode()\n    os.write(3, struct.pack('>I', len(b)) + b)\ndef f(n):\n    return n\n",
        "forge_check": "def check(candidate):\n    pass\ndef f(n):\n    return n\n",
        "forge_main": "if True:\n    __name__ = '__main__'\ndef f(n):\n    return n\nimport sys\nsys.exit(0)\n",
        "forge_builtins_module": "__builtins__ = {}\ndef f(n):\n    return n\n",
        "forge_import_hook": "import sys\nclass H:\n    def find_spec(self, *a):\n        raise SystemExit(0)\n"
        "sys.meta_path.insert(0, H())\nsys.path_hooks.clear()\ndef f(n):\n    import nothing\n",
    },
}

CORPUS = [
    Hostile(name, harm, "ANSWER = 'pass'\n" + _body(code))
    for harm, programs in _CALLS.items()
    for name, code in programs.items()
] + [Hostile(name, harm, source) for harm, programs in _MODULES.items() for name, source in programs.items()]
