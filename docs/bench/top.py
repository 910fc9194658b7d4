#!/usr/bin/env python3
"""What `larder top` costs on a store with many images: top.py LARDER [IMAGES [SECONDS]]

Prints the time from its start to the list of IMAGES (10000), and then over SECONDS (60), while nothing happens, CPU time and memory
of top and of the daemon. Needs root and a larder with the feature `top`; the store is in memory.
"""
import contextlib, fcntl, os, pty, select, shutil, struct, subprocess, sys, tempfile, termios, time

sys.path[:0] = [os.path.dirname(__file__), os.path.dirname(__file__) + '/../../scripts']
import image_family
from idle import cpu_seconds, memory, start, stop


class Top:
    """`larder top` on a terminal of 120 columns."""

    def __init__(self, larder, home):
        self.began, self.screen = time.perf_counter(), b''
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.execve(larder, [larder, '--root', home + '/store', 'top'], {'HOME': home, 'PATH': os.environ['PATH'], 'TERM': 'xterm'})
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack('HHHH', 40, 120, 0, 0))

    def read(self, end, until=None):
        """Reads the screen, which would block top if it was not read, until that time or until a text is printed."""
        while (left := end - time.perf_counter()) > 0 and not (until and until in self.screen):
            if select.select([self.terminal], [], [], left)[0]:
                self.screen += os.read(self.terminal, 65536)

    def quit(self):
        os.write(self.terminal, b'q')
        os.waitpid(self.pid, 0)


def main():
    larder = os.path.abspath(sys.argv[1])
    images, seconds = (int(text) for text in sys.argv[2:] + ['10000', '60'][len(sys.argv) - 2:])
    with contextlib.ExitStack() as ends:
        home = tempfile.mkdtemp(dir='/dev/shm')
        ends.callback(shutil.rmtree, home)
        for archive in image_family.many_images(home, images):
            subprocess.run([larder, '--root', home + '/store', 'load', '-i', archive], check=True, stdout=subprocess.DEVNULL)
        daemon, *_ = start(larder, home)
        ends.callback(stop, daemon)
        time.sleep(15)
        print(f"daemon before: {memory(daemon.pid)['VmRSS']:.1f} MiB")
        top = Top(larder, home)
        ends.callback(top.quit)
        top.read(top.began + 60, b'app-')
        assert b'app-' in top.screen, top.screen[-2000:]
        print(f'{images} images: listed after {time.perf_counter() - top.began:.2f} s')
        pids = {'top': top.pid, 'daemon': daemon.pid}
        top.read(time.perf_counter() + 15)
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        top.read(time.perf_counter() + seconds)
        for name, pid in pids.items():
            used = 60 / seconds * (cpu_seconds(pid) - before[name])
            print(f"{name}: {used:.2f} s of CPU a minute, {memory(pid)['VmRSS']:.1f} MiB")


main()
