"""The system calls that a solution may make, with their numbers (Linux, asm/unistd.h). All others are refused."""

from __future__ import annotations

# name, number on x86_64, number on aarch64, or - where there is none: files that are open or can be read; memory;
# signals to itself, threads and time; who and where it is; what starts it (bubblewrap's init, setpriv, Python)
TABLE = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, close 3 57, lseek 8 62,
ftruncate 77 46, dup 32 23, dup2 33 -, dup3 292 24, fcntl 72 25, ioctl 16 29, pipe 22 -, pipe2 293 59,
poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, open 2 -, openat 257 56, stat 4 -, lstat 6 -,
fstat 5 80, newfstatat 262 79, statx 332 291, statfs 137 43, fstatfs 138 44, access 21 -, faccessat 269 48,
faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents 78 -, getdents64 217 61, getcwd 79 17,
chdir 80 49,
mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, msync 26 227, mincore 27 232, madvise 28 233,
brk 12 214, get_mempolicy 239 236,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigtimedwait 128 137,
sigaltstack 131 132, tgkill 234 131, restart_syscall 219 128, futex 202 98, set_tid_address 218 96,
set_robust_list 273 99, get_robust_list 274 100, rseq 334 293, membarrier 324 283, sched_yield 24 124,
sched_getaffinity 204 123, sched_setaffinity 203 122, sched_getparam 143 121, sched_getscheduler 145 120,
getcpu 309 168, arch_prctl 158 -, pause 34 -, nanosleep 35 101, clock_nanosleep 230 115, alarm 37 -,
getitimer 36 102, setitimer 38 103, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169,
times 100 153, exit 60 93, exit_group 231 94,
getpid 39 172, gettid 186 178, getppid 110 173, getpgrp 111 -, getuid 102 174, geteuid 107 175,
getgid 104 176, getegid 108 177, getgroups 115 158, getresuid 118 148, getresgid 120 150, uname 63 160,
sysinfo 99 179, getrandom 318 278, getrusage 98 165, getrlimit 97 163, setrlimit 160 164,
prlimit64 302 261,
wait4 61 260, execve 59 221, prctl 157 167, capget 125 90, capset 126 91, setuid 105 146, setgid 106 144,
setgroups 116 159,
setreuid 113 145, setregid 114 143, setresuid 117 147, setresgid 119 149,
"""


def numbers(machine: str) -> list[int]:
    """Return the allowed numbers, sorted, for "x86_64" or "aarch64"."""
    rows = [entry.split() for entry in TABLE.replace("\n", " ").split(",") if entry.strip()]
    column = {"x86_64": 1, "aarch64": 2}[machine]
    return sorted(int(row[column]) for row in rows if row[column] != "-")
