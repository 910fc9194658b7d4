"""Pods whose images are pulled lazily, for scripts/kubelet-suite: whatever dies, each byte that they read is right, or the read fails."""
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from cluster import Cluster, pod
from peers import MIB, random_bytes, run, wait_for

REPOSITORY = 'lazy/app'  # one, so that the layer of busybox is pulled once
FILES, FILE_SIZE = 24, MIB
SLOW, STALLED = MIB, 10  # bytes per second, of each response
READ_TIMEOUT = 8  # seconds
KILL_SECONDS = 60
FAILED = ('ErrImagePull', 'ImagePullBackOff', 'CreateContainerError', 'RunContainerError', 'CrashLoopBackOff', 'Error')
# The last file first: the data comes in the other order. The sums are written in one step.
SUMS = 'cd {0} && busybox find . -type f | busybox sort -r | busybox xargs busybox sha256sum'
READER = f'{SUMS.format("/data")} > /sums.new 2>&1; busybox mv /sums.new /sums; exec busybox sleep 1000000'
MAPPED = '''
import mmap, hashlib, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
    print(hashlib.sha256(mapped).hexdigest())
'''


def files_of(name):
    files = {f'data/part-{number:02}': random_bytes(FILE_SIZE, f'{name} {number}') for number in range(FILES)}
    # A program may have whatever follows; this one runs what its first argument says if its name begins so.
    return {**files, 'data/busybox-more': Path('/bin/busybox').read_bytes() + random_bytes(MIB, f'{name} program')}


def digests_of(files):
    return {path.removeprefix('data/'): hashlib.sha256(data).hexdigest() for path, data in files.items()}


def parse_sums(text):
    lines = (line.split('  ', 1) for line in text.splitlines() if re.match('[0-9a-f]{64}  ', line))
    return {path.removeprefix('./'): digest for digest, path in lines}


class LazyTrial:
    def __init__(self, suite, larder, cluster, containerd):
        self.suite, self.larder, self.cluster, self.containerd = suite, larder, cluster, containerd
        self.expected, self.said = {}, ''  # the sums of each image, and what the last program said that read files

    def check(self, description, passed, outcome=''):
        self.suite.check('lazy', description, bool(passed), outcome)

    def image(self, tag):
        return f'127.0.0.1:{self.suite.slow.port}/{REPOSITORY}:{tag}'

    def push(self, tag):
        files = files_of(tag)
        self.expected[tag] = digests_of(files)
        self.suite.open.push(REPOSITORY, tag, files)

    def create(self, name, tag, script=READER, volume=None):
        body = pod(name, self.image(tag), 'IfNotPresent')
        container = body['spec']['containers'][0]
        container['command'] = ['/bin/busybox', 'sh', '-c', script]
        if volume:
            body['spec']['volumes'] = [{'name': 'volume', 'image': {'reference': self.image(volume), 'pullPolicy': 'IfNotPresent'}}]
            container['volumeMounts'] = [{'name': 'volume', 'mountPath': '/volume'}]
        self.cluster.call('POST', '/api/v1/namespaces/default/pods', body)

    def begin(self, name, tag, **options):
        """Creates a pod of an image that is pulled slowly, and waits until it runs; returns after how many seconds."""
        self.suite.slow.rate, created = SLOW, time.monotonic()
        self.create(name, tag, **options)
        state = self.cluster.wait_state(name, 'Running', *FAILED)
        seconds = time.monotonic() - created
        if state != 'Running':
            raise TimeoutError(f'{name}: {state}')
        return seconds

    def status(self):
        return self.larder.data('status').get('lazyPulls', {})

    def missing(self, tag):
        """Bytes of an image that are not here."""
        rows = [row for row in self.larder.data('images') if f'{row["repository"]}:{row["tag"]}' == self.image(tag)]
        return rows[0]['missingBytes'] or 0

    def containers(self, name):
        return run(*self.containerd.crictl, 'ps', '--quiet', '--label', f'io.kubernetes.pod.name={name}').split()

    def container(self, name):
        return self.containers(name)[0]

    def start(self, name, *command):
        command = [*self.containerd.crictl, 'exec', self.container(name), *command]
        return subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.suite.work)

    def execute(self, name, *command):
        output = self.start(name, *command).communicate(timeout=180)[0]
        return re.sub('^time=.*\n', '', output, flags=re.MULTILINE)  # messages of crictl itself

    def shell(self, name, script):
        return self.execute(name, '/bin/busybox', 'sh', '-c', script)

    def sums(self, name, directory='/data'):
        self.said = self.shell(name, SUMS.format(directory))
        return parse_sums(self.said)

    def read_by_pod(self, name):
        """The sums that the program of the pod has seen, once it has read all."""
        self.said = wait_for(f'the sums of {name}', lambda: self.shell(name, 'busybox test -e /sums && busybox cat /sums'), 180)
        return parse_sums(self.said)

    def equal(self, tag, seen, seconds=None):
        """Arguments of a check that all sums are right."""
        wrong = sorted(path for path, digest in self.expected[tag].items() if seen.get(path) != digest)
        outcome = f'{len(seen)} files read, {len(wrong)} wrong' + (f': {" ".join(wrong)}; {self.said[-400:]}' if wrong else '')
        return not wrong and len(seen) == len(self.expected[tag]), outcome + ('' if seconds is None else f'; {seconds:.1f} s')

    def wait_complete(self, *tags):
        wait_for('complete images', lambda: not any(self.missing(tag) for tag in tags), 120)

    def marks(self):
        """Files that are marked in the group; none, if its holder has ended."""
        marks = 0
        with contextlib.suppress(OSError):
            for info in Path('/proc', str(self.larder.holder()), 'fdinfo').iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed since
                    marks += info.read_text().count('fanotify ino:')
        return marks

    # --- Checks

    def ready_early(self):
        seconds = self.begin('early', 'early')
        missing, total = self.missing('early'), FILES * FILE_SIZE
        self.check('a pod runs before its image is here', missing > total // 2, f'{seconds:.2f} s after its creation; {missing >> 20} MiB of {total >> 20} missing')
        began = time.monotonic()
        output = self.execute('early', '/data/busybox-more', 'echo', 'ran')
        self.check('exec of a missing file', output.strip().endswith('ran'), f'{output.strip()}; {time.monotonic() - began:.1f} s')
        self.check('each byte, read by the program of the pod', *self.equal('early', self.read_by_pod('early'), time.monotonic() - began))
        message = [event['message'] for event in self.cluster.call('GET', '/api/v1/namespaces/default/events')['items']
                   if event['involvedObject']['name'] == 'early' and event['reason'] == 'Pulled']
        self.check("kubelet's event", message, message and message[0])
        self.suite.slow.release()
        self.wait_complete('early')
        self.check('the image completes', True, f'{time.monotonic() - began:.1f} s later')

    def mount_volume(self):
        seconds = self.begin('volume', 'early', volume='volume', script='exec busybox sleep 1000000')
        missing = self.missing('volume')
        self.check('an image volume of a lazy image', missing, f'{seconds:.2f} s; {missing >> 20} MiB missing')
        pid = json.loads(run(*self.containerd.crictl, 'inspect', self.container('volume')))['info']['pid']
        mapped = run(sys.executable, '-c', MAPPED, f'/proc/{pid}/root/volume/data/part-20').strip()
        self.check('image volume: a missing file, read through a mapping', mapped == self.expected['volume']['part-20'], f'{mapped[:12]}')
        self.check('image volume: each byte', *self.equal('volume', self.sums('volume', '/volume/data')))
        self.suite.slow.release()
        self.wait_complete('volume')

    def stop_servers(self):
        for server in (self.larder, self.containerd):
            for number in (signal.SIGTERM, signal.SIGKILL):
                name = f'{"larder" if server is self.larder else "containerd"}-{number.name}'.lower()
                self.begin(name, name)
                began, missing = time.monotonic(), self.missing(name)
                wait_for('a read that waits', lambda: self.status().get('waitingReads'))
                self.suite.slow.rate = STALLED
                server.server.stop(number)
                time.sleep(2)
                server.server.start()
                server.wait()
                left = self.missing(name)
                self.suite.slow.release()
                self.check(f'{name} while a pod reads what is missing', *self.equal(name, self.read_by_pod(name), time.monotonic() - began))
                self.check(f'{name}: the fill goes on', left, f'{missing >> 20} MiB missing before, {left >> 20} MiB after')
                self.check(f'{name}: state of the pod', self.cluster.state(name) == 'Running', self.cluster.state(name))
                self.wait_complete(name)

    def kill_holder(self):
        self.begin('holder', 'holder')
        first = self.larder.holder()
        os.kill(first, signal.SIGKILL)
        self.larder.restart(signal.SIGKILL)
        second = wait_for('another holder', lambda: (now := self.larder.holder()) != first and now)
        self.suite.slow.release()
        self.check('the holder and larder killed', *self.equal('holder', self.read_by_pod('holder')))
        self.check('the next holder keeps the group', second == self.larder.holder())
        self.wait_complete('holder')

    def kill_often(self):
        """One after another, while one pod reads all: larder, the holder, containerd."""
        self.begin('often', 'often')
        self.suite.slow.rate, kills, began = SLOW // 4, {'larder': 0, 'holder': 0, 'containerd': 0}, time.monotonic()
        while self.missing('often') and time.monotonic() < began + KILL_SECONDS:
            for name in kills:
                if name == 'holder':
                    before = self.larder.holder()
                    os.kill(before, signal.SIGKILL)
                    wait_for('another holder', lambda: self.larder.holder() != before)
                else:
                    {'larder': self.larder, 'containerd': self.containerd}[name].restart(signal.SIGKILL)
                kills[name] += 1
        left = self.missing('often')
        self.suite.slow.release()
        passed, outcome = self.equal('often', self.read_by_pod('often'), time.monotonic() - began)
        self.check('one killed after another while a pod reads', passed, f'{kills}, {left >> 20} MiB were still missing; {outcome}')
        self.wait_complete('often')

    def kill_all(self):
        """The pods that run may have read zeros: they are named, and right after a restart of any kind."""
        self.begin('both', 'both', volume='both-volume')
        self.begin('beside', 'early')  # complete
        wait_for('a read that waits', lambda: self.status().get('waitingReads'))
        self.suite.slow.rate = STALLED
        self.larder.kill_holders()
        os.kill(self.larder.server.process.pid, signal.SIGKILL)
        self.larder.server.process.wait()
        zeros = self.read_by_pod('both')
        self.sums('both', '/volume/data')  # both in memory now
        wrong = [path for path, digest in self.expected['both'].items() if zeros.get(path) != digest]
        self.larder.server.start()
        self.larder.wait()
        print(f'       larder and both holders killed: {len(wrong)} files read wrongly meanwhile')
        events = [json.loads(line) for line in self.larder.call('events', '-o', 'json').splitlines()]
        named = [event['message'] for event in events if event['reason'] == 'ImageWarning']
        self.check('larder and both holders killed: the images are named', all(any(f'{self.image(tag)} ' in text for text in named) == is_suspect
                                                                            for tag, is_suspect in [('both', True), ('both-volume', True), ('early', False)]), ' | '.join(named))
        warnings = lambda: [text for text in self.larder.data('status')['warnings'] if 'zeros' in text]
        self.check('larder and both holders killed: status names the pod', len(warnings()) == 1 and 'pod default/both ' in warnings()[0], ' | '.join(warnings()))
        self.larder.restart(signal.SIGTERM)
        self.check('larder and both holders killed: status names it after another start', len(warnings()) == 1, ' | '.join(warnings()))
        self.suite.slow.rate = SLOW
        self.begin('both-new', 'both', volume='both-volume')
        self.check('larder and both holders killed: another pod', *self.equal('both', self.sums('both-new')))
        self.check('larder and both holders killed: another pod, image volume', *self.equal('both-volume', self.sums('both-new', '/volume/data')))
        before = self.container('both')
        run(*self.containerd.crictl, 'stop', '--timeout', '0', before)
        wait_for('another container', lambda: before not in (ids := self.containers('both')) and ids)
        self.check('larder and both holders killed: container started again', *self.equal('both', self.read_by_pod('both')))
        volume = self.sums('both', '/volume/data')  # containerd keeps it as long as the pod
        wrong = [path for path, digest in self.expected['both-volume'].items() if volume.get(path) != digest]
        print(f'       container started again: {len(wrong)} files of the image volume are read wrongly')
        self.cluster.delete('both')
        self.check('larder and both holders killed: without the pod, status has no warning', wait_for('no warning', lambda: not warnings()))
        self.suite.slow.release()
        self.wait_complete('both', 'both-volume')

    def lose_registry(self):
        self.begin('gone', 'gone', script='exec busybox sleep 1000000')
        self.suite.slow.is_gone, began = True, time.monotonic()
        output = self.shell('gone', 'busybox sha256sum /data/part-23')
        seconds = time.monotonic() - began
        self.check('registry gone: the read fails in time', 'Input/output error' in output and seconds < READ_TIMEOUT + 4, f'{output.strip()}; {seconds:.1f} s')
        run_it = self.execute('gone', '/data/busybox-more', 'echo', 'ran')
        self.check('registry gone: exec of a missing file fails', 'ran' not in run_it.split(), ' '.join(run_it.split()))
        self.larder.restart(signal.SIGKILL)
        again = self.shell('gone', 'busybox sha256sum /data/part-22')
        self.check('registry gone, and larder killed: the read fails', 'Input/output error' in again, again.strip())
        self.suite.slow.release()
        began = time.monotonic()
        self.check('registry back: the next read', *self.equal('gone', self.sums('gone')))
        self.wait_complete('gone')
        self.check('registry back: the image completes', True, f'{time.monotonic() - began:.1f} s')

    def remove(self):
        self.begin('removed', 'removed')
        run(*self.containerd.crictl_of(self.larder.socket), 'rmi', self.image('removed'))
        self.suite.slow.rate = STALLED
        self.larder.restart(signal.SIGKILL)
        self.suite.slow.rate = SLOW
        self.check('crictl rmi while a pod reads what is missing, and larder killed: the pod', *self.equal('removed', self.read_by_pod('removed')))
        wait_for('the end of the fill', lambda: not self.status().get('incompleteLayers'))
        self.check('crictl rmi, and larder killed: the layer completes', self.equal('removed', self.sums('removed'))[0])
        self.begin('removed-new', 'removed')
        self.cluster.delete('removed')
        self.check('crictl rmi, and pulled again', *self.equal('removed', self.read_by_pod('removed-new')))
        self.suite.slow.rate = SLOW
        self.begin('deleted', 'deleted')
        layers, marks = self.status().get('incompleteLayers'), self.marks()
        self.cluster.delete('deleted')
        wait_for('the end of the pod', lambda: not self.containers('deleted'))
        run(*self.containerd.crictl_of(self.larder.socket), 'rmi', self.image('deleted'))
        wait_for('the end of the fill', lambda: self.status().get('incompleteLayers', 0) < layers, 30)
        self.check('pod deleted and image removed while it is filled: the fill ends', self.marks() < marks, f'{marks} marks before, {self.marks()} after')
        self.begin('deleted-new', 'deleted')
        self.suite.slow.release()
        self.check('pod deleted and image removed, and pulled again', *self.equal('deleted', self.read_by_pod('deleted-new')))

    def commit(self):
        """A snapshot on a partial parent: of `ctr`, which commits it."""
        self.begin('parent', 'parent', script='exec busybox sleep 1000000')
        image, target = self.image('parent'), self.suite.work / 'ctr-mount'
        target.mkdir()
        ctr, snapshots = self.containerd.ctr, ('snapshots', '--snapshotter', 'larder')
        chain = json.loads(ctr(*snapshots, 'info', self.snapshot_of('parent')))['Parent']
        for key, parent, name in [('suite-work', chain, 'suite-committed'), ('suite-work-2', 'suite-committed', None)]:
            ctr(*snapshots, 'prepare', key, parent)
            run('sh', '-c', ctr(*snapshots, 'mounts', target, key))
            if name:
                (target / 'data' / 'part-05').open('ab').write(b'more')  # copied up while it is missing
            found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (target / 'data').iterdir()}
            run('umount', target)
            expected = {**self.expected['parent'], 'part-05': hashlib.sha256(files_of('parent')['data/part-05'] + b'more').hexdigest()}
            wrong = sorted(path for path in expected if found.get(path) != expected[path])
            self.check(f'a snapshot of ctr on {"a partial layer" if name else "its commit"}: each byte', not wrong, f'{len(found)} files, {len(wrong)} wrong {wrong}')
            if name:
                ctr(*snapshots, 'commit', name, key)
        for key in ('suite-work-2', 'suite-committed'):
            ctr(*snapshots, 'rm', key)
        self.suite.slow.release()
        self.wait_complete('parent')

    def snapshot_of(self, name):
        return json.loads(run(*self.containerd.crictl, 'inspect', self.container(name)))['info']['snapshotKey']

    def end(self):
        self.suite.slow.release()
        tags = [tag for tag in self.expected if self.larder.has(self.image(tag))]
        self.wait_complete(*tags)
        wait_for('the end of the marks', lambda: not self.marks(), 30)
        self.check('all images complete: no mark is left', not self.marks() and not self.status().get('incompleteLayers'), str(self.status()))
        listed = {name: int(image['size']) for image in json.loads(run(*self.containerd.crictl_of(self.larder.socket), 'images', '-o', 'json'))['images']
                  for name in image['repoTags']}
        short = [tag for tag in tags if listed.get(self.image(tag), 0) < FILES * FILE_SIZE]
        self.check('crictl images: all of them, with their sizes', not short, f'{len(tags)} images; {short}')


def run_lazy(suite):
    with contextlib.ExitStack() as stack:
        root = suite.work / 'lazy-root'
        larder, containerd = suite.runtime(stack, root, {'pull': {'ensuredLease': '0s', 'lazy': {'readTimeout': f'{READ_TIMEOUT}s'}}})
        cluster = Cluster(suite, containerd.socket, larder.socket)
        stack.callback(cluster.stop)
        trial = LazyTrial(suite, larder, cluster, containerd)
        for tag in ('early', 'volume', 'larder-sigterm', 'larder-sigkill', 'containerd-sigterm', 'containerd-sigkill', 'holder', 'often', 'both', 'both-volume', 'gone',
                    'removed', 'deleted', 'parent'):
            trial.push(tag)
        for step in (trial.ready_early, trial.mount_volume, trial.stop_servers, trial.kill_holder, trial.kill_often, trial.kill_all, trial.lose_registry, trial.remove,
                     trial.commit, trial.end):
            try:
                step()
            except (TimeoutError, subprocess.SubprocessError, OSError, ValueError, LookupError) as error:
                suite.check('lazy', f'{step.__name__} ends', False, f'{error!r} {getattr(error, "stdout", "")} {getattr(error, "stderr", "")}')
                suite.slow.release()
        larder.server.stop()
        done = subprocess.run([larder.program, 'fsck', '--root', larder.root], capture_output=True, text=True)
        suite.check('lazy', 'larder fsck: no damage', done.returncode == 0, (done.stdout + done.stderr).strip().splitlines()[-1])
        larder.server.start()
        larder.wait()
