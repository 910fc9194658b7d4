"""Real servers on this machine for the suites of larder: docker-registry, containerd (1.6 to 2.x) and larder itself.

Every server listens on loopback or on a socket in a directory of the caller, and is stopped by its process.
"""
import base64
import contextlib
import functools
import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from pathlib import Path

MIB = 1 << 20


def free_port():
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def run(*command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True, **options).stdout


def wait_for(description, condition, seconds=90):
    """Waits until `condition` returns something true, and returns it; a condition that raises is not yet true."""
    end = time.monotonic() + seconds
    error = None
    while time.monotonic() < end:
        try:
            if value := condition():
                return value
        except (OSError, KeyError, ValueError, subprocess.CalledProcessError) as failure:
            error = failure
        time.sleep(0.2)
    raise TimeoutError(f'{description}: not within {seconds} s' + (f' (last error: {error})' if error else ''))


class Server:
    """A process with its log in a file."""

    started = []  # all, in order: what an error leaves running is stopped at the end

    def __init__(self, work, name, *command, environment=None, listener=None):
        """With a `listener`, it gets that socket as systemd passes one."""
        self.command, self.environment = [str(part) for part in command], {**os.environ, **(environment or {})}
        self.log, self.inherited = work / f'{name}.log', [listener.fileno()] if listener else []
        if listener:
            self.command[:0] = ['sh', '-c', f'exec 3<&{listener.fileno()}; LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" "$@"']
        self.start()

    def start(self):
        with self.log.open('ab') as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=self.environment, start_new_session=True,
                                            pass_fds=self.inherited)
        Server.started.append(self)

    def stop(self, signal_number=signal.SIGTERM, seconds=30):
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def signal(self, number):
        """Sends a signal that ends the process, and starts it again as soon as it has ended."""
        self.stop(number, 60)
        self.start()


def layer_of(files):
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode='w') as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return layer.getvalue()


@functools.cache
def busybox_layer():
    busybox = Path(shutil.which('busybox')).read_bytes()
    return layer_of({'bin/busybox': busybox, 'bin/sleep': busybox, 'bin/sh': busybox})


def random_bytes(count, seed):
    """Bytes that do not compress, the same for each run."""
    return hashlib.shake_256(str(seed).encode()).digest(count)


class Registry:
    """docker-registry, with or without a password, and what pushes images to it.

    With `podman`, a program of version 5, images are pushed as zstd:chunked.
    """

    USER, PASSWORD = 'reader', 'correct-horse'
    PASSWORD_HASH = '$2b$05$abcdefghijklmnopqrstuuZ0Fx87Pb/Aqb0E90lfvCwzXnaFKUHpS'  # bcrypt, the only one that docker-registry knows

    def __init__(self, work, name, private=False, storage=None, link=None, podman=None):
        self.port, self.private, self.host = free_port(), private, link.there if link else '127.0.0.1'
        self.podman, self.scratch = podman, work / f'{name}-podman'
        config = {'version': 0.1, 'log': {'level': 'info'}, 'http': {'addr': f'{"" if link else self.host}:{self.port}'},
                  'storage': {'filesystem': {'rootdirectory': str(storage or work / name)}}}
        if private:
            password = work / 'htpasswd'
            password.write_text(f'{self.USER}:{self.PASSWORD_HASH}\n')
            config['auth'] = {'htpasswd': {'realm': 'suite', 'path': str(password)}}
        (work / f'{name}.yml').write_text(json.dumps(config))
        self.server = Server(work, name, *(link.command if link else ()), 'docker-registry', 'serve', work / f'{name}.yml')
        wait_for(name, lambda: socket.create_connection((self.host, self.port)))

    def call(self, method, location, data=b'', **headers):
        if self.private:
            headers['Authorization'] = 'Basic ' + base64.b64encode(f'{self.USER}:{self.PASSWORD}'.encode()).decode()
        url = location if location.startswith('http') else f'http://{self.host}:{self.port}{location}'
        return urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method))

    def blob(self, repository, content):
        digest = 'sha256:' + hashlib.sha256(content).hexdigest()
        location = self.call('POST', f'/v2/{repository}/blobs/uploads/').headers['Location']
        separator = '&' if '?' in location else '?'
        self.call('PUT', f'{location}{separator}digest={digest}', content, **{'Content-Type': 'application/octet-stream'})
        return {'digest': digest, 'size': len(content)}

    def push(self, repository, tag, files, user='', command=('/bin/sleep', '1000000'), base=None):
        """Pushes an image with busybox and a layer of `files`, or with the layers of the image `base` below; returns its digest."""
        layers = [busybox_layer(), layer_of(files)]
        below, below_diff_ids = self.layers_of(base, repository) if base else ([], [])
        config = {'architecture': 'amd64', 'os': 'linux', 'config': {'Cmd': list(command), 'User': user, 'Env': ['PATH=/bin']},
                  'rootfs': {'type': 'layers', 'diff_ids': below_diff_ids + ['sha256:' + hashlib.sha256(layer).hexdigest() for layer in layers]}}
        manifest = {'schemaVersion': 2, 'mediaType': 'application/vnd.oci.image.manifest.v1+json',
                    'config': {'mediaType': 'application/vnd.oci.image.config.v1+json',
                               **self.blob(repository, json.dumps(config).encode())},
                    'layers': below + [{'mediaType': 'application/vnd.oci.image.layer.v1.tar', **self.blob(repository, layer)}
                                       for layer in layers]}
        content = json.dumps(manifest).encode()
        self.call('PUT', f'/v2/{repository}/manifests/{tag}', content, **{'Content-Type': manifest['mediaType']})
        return self.push_chunked(repository, tag) if self.podman else 'sha256:' + hashlib.sha256(content).hexdigest()

    def push_chunked(self, repository, tag):
        """Replaces an image by one of the same files, whose layers have tables of contents; returns its digest."""
        image, digest = f'127.0.0.1:{self.port}/{repository}:{tag}', self.scratch / 'digest'
        podman = [self.podman, '--root', self.scratch / 'root', '--runroot', self.scratch / 'run', '--storage-driver', 'vfs']
        access = ['--tls-verify=false', *([f'--creds={self.USER}:{self.PASSWORD}'] if self.private else [])]
        run(*podman, 'pull', '--quiet', *access, image)
        run(*podman, 'push', '--compression-format', 'zstd:chunked', '--force-compression', '--digestfile', digest, *access, image)
        run(*podman, 'rmi', '--force', image)
        return digest.read_text().strip()

    def layers_of(self, image, repository):
        """The layers of an image, mounted into `repository`, and their diff IDs."""
        name, tag = image.rsplit(':', 1)
        kinds = 'application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json'
        manifest = json.load(self.call('GET', f'/v2/{name}/manifests/{tag}', None, Accept=kinds))
        config = json.load(self.call('GET', f'/v2/{name}/blobs/{manifest["config"]["digest"]}', None))
        for layer in manifest['layers']:
            self.call('POST', f'/v2/{repository}/blobs/uploads/?mount={layer["digest"]}&from={name}')
        return manifest['layers'], config['rootfs']['diff_ids']

    def blob_fetches(self):
        """How often each blob was fetched, and by which program."""
        fetched = re.findall(r'"GET /v2/[^"]*/blobs/(sha256:[0-9a-f]{64}) [^"]*" (?:200|206|307) \d+ "[^"]*" "([^"]*)"', self.server.log.read_text())
        return [(digest, agent.split('/')[0]) for digest, agent in fetched]


class Link:
    """A network namespace for a registry, behind a link of 1 Gbit/s, and a proxy there that delays its answers by 5 ms."""

    HERE = '10.231.7.1'
    there = '10.231.7.2'

    def __init__(self, work, stack):
        self.work, name = work, f'larder{os.getpid()}'
        self.command = ('ip', 'netns', 'exec', name)
        run('ip', 'netns', 'add', name)
        stack.callback(run, 'ip', 'netns', 'del', name)
        run('ip', 'link', 'add', name, 'type', 'veth', 'peer', 'name', 'registry', 'netns', name)
        run('ip', 'address', 'add', f'{self.HERE}/24', 'dev', name)
        run(*self.command, 'ip', 'address', 'add', f'{self.there}/24', 'dev', 'registry')
        for command, device in ((), name), (self.command, 'registry'):
            run(*command, 'tc', 'qdisc', 'add', 'dev', device, 'root', 'tbf', 'rate', '1gbit', 'burst', '256kb', 'latency', '50ms')
            run(*command, 'ip', 'link', 'set', device, 'up')
        run(*self.command, 'ip', 'link', 'set', 'lo', 'up')

    def delayed(self, registry):
        """The port of the proxy of a registry."""
        port = free_port()
        proxy = Path(__file__).with_name('delay_proxy.py')
        Server(self.work, 'delay', *self.command, proxy, self.there, port, registry.port, '5')
        wait_for('the proxy', lambda: socket.create_connection((self.there, port)))
        return port


def write_hosts(directory, port, host='127.0.0.1'):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / 'hosts.toml').write_text(f'[host."http://{host}:{port}"]\ncapabilities = ["pull", "resolve"]\n')


def unmount_below(directory):
    """Unmounts what kubelet and containerd left there, the last mount first."""
    points = [line.split()[4] for line in Path('/proc/self/mountinfo').read_text().splitlines()]
    for point in reversed([point for point in points if f'{point}/'.startswith(f'{directory}/')]):
        run('umount', '--lazy', point)


PAUSE = 'registry.k8s.io/pause:3.10.1'
CONFIG_3 = '''
version = 3
disabled_plugins = ['io.containerd.internal.v1.opt', 'io.containerd.nri.v1.nri', 'io.containerd.tracing.processor.v1.otlp']
[plugins.'io.containerd.cri.v1.images']
snapshotter = '{snapshotter}'
use_local_image_pull = {is_local}
disable_snapshot_annotations = {no_annotations}
[plugins.'io.containerd.cri.v1.images'.registry]
config_path = '{certs}'
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = '{pause}'
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
disable_cgroup = false
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = false
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ['{state}']
conf_dir = '{state}'
[plugins.'io.containerd.grpc.v1.cri']
disable_tcp_service = true
[[plugins.'io.containerd.transfer.v1.local'.unpack_config]]
platform = 'linux'
snapshotter = '{snapshotter}'
differ = '{differ}'
[[plugins.'io.containerd.transfer.v1.local'.unpack_config]]
platform = 'linux'
snapshotter = 'overlayfs'
'''
CONFIG_2 = '''
version = 2
disabled_plugins = ['io.containerd.internal.v1.opt', 'io.containerd.tracing.processor.v1.otlp']
[plugins.'io.containerd.grpc.v1.cri']
disable_tcp_service = true
sandbox_image = '{pause}'
restrict_oom_score_adj = true
[plugins.'io.containerd.grpc.v1.cri'.containerd]
snapshotter = '{snapshotter}'
disable_snapshot_annotations = {no_annotations}
[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.grpc.v1.cri'.registry]
config_path = '{certs}'
[plugins.'io.containerd.grpc.v1.cri'.cni]
bin_dir = '{state}'
conf_dir = '{state}'
'''
COMMON = '''
[grpc]
address = '{socket}'
[ttrpc]
address = '{socket}.ttrpc'
'''
PROXY = '''
[proxy_plugins.larder]
type = 'snapshot'
address = '{larder.socket}'
'''
EROFS = '''
[plugins.'io.containerd.differ.v1.erofs']
mkfs_options = ['-T0', '--mkfs-time', '--sort=none']
[plugins.'io.containerd.service.v1.diff-service']
default = ['erofs', 'walking']
[plugins.'io.containerd.transfer.v1.local']
max_concurrent_downloads = 6
max_concurrent_unpacks = 4
'''
EXPORTS = '''
[proxy_plugins.larder.exports]
root = '{larder.root}'
'''


class Containerd:
    """containerd of `programs`, by default of the peers, with registries from `certs`. Without peers there is no crictl.

    `snapshotter` is that of its CRI plugin: a Larder, or 'overlayfs', or 'erofs' with its differ, which needs erofs-utils 1.8.2 or newer.
    """

    def __init__(self, peers, work, root, certs, snapshotter='overlayfs', annotations=False, programs=None):
        self.peers, self.root, self.state = peers, root, work / 'containerd'
        self.socket = self.state / 'containerd.sock'
        program, self.ctr_program = (programs or peers) / 'containerd', (programs or peers) / 'ctr'
        self.version = re.search(r' v?(\d+\.\d+\S*)', run(program, '--version'))[1]
        self.state.mkdir()
        root.mkdir(parents=True, exist_ok=True)
        is_old = self.version.startswith('1.')
        larder = None if isinstance(snapshotter, str) else snapshotter
        self.snapshotter = 'larder' if larder else snapshotter
        is_erofs = snapshotter == 'erofs'
        text = (CONFIG_2 if is_old else CONFIG_3).format(
            snapshotter=self.snapshotter, differ='erofs' if is_erofs else 'walking', is_local=str(not is_erofs).lower(),
            no_annotations=str(not annotations).lower(), certs=certs, pause=PAUSE, state=self.state)
        version, rest = text.strip().split('\n', 1)
        config = self.state / 'config.toml'
        config.write_text(f"{version}\nroot = '{root}'\nstate = '{self.state}/run'\n{rest}\n" + COMMON.format(socket=self.socket)
                          + ((PROXY if is_old else PROXY + EXPORTS).format(larder=larder) if larder else EROFS if is_erofs else ''))
        self.crictl = peers and self.crictl_of(self.socket)
        self.server = Server(work, 'containerd', program, '--config', config, environment={'PATH': f'{program.parent}:{os.environ["PATH"]}'})
        self.wait()

    def crictl_of(self, images):
        return [self.peers / 'crictl', '--timeout', '120s', '--runtime-endpoint', f'unix://{self.socket}', '--image-endpoint', f'unix://{images}']

    def wait(self):
        wait_for('containerd', lambda: run(*self.crictl, 'info') if self.crictl else self.ctr('plugins', 'ls', '-d', 'id==cri'))

    def ctr(self, *arguments, namespace='k8s.io', **options):
        return run(self.ctr_program, '--address', self.socket, '--namespace', namespace, *arguments, **options)

    def restart(self, signal_number):
        self.server.stop(signal_number)
        self.server.start()
        self.wait()

    def stop(self):
        if self.crictl:
            with contextlib.suppress(subprocess.CalledProcessError):
                run(*self.crictl, 'rmp', '--all', '--force')
        self.server.stop()


class Larder:
    """`larder serve` with a settings file of its own."""

    def __init__(self, program, work, certs, name, backend, root=None, held=False, **settings):
        """With `held`, the suite holds the socket, as systemd does with larder.socket."""
        self.program, self.directory = program, work / name
        self.directory.mkdir()
        self.root = root or self.directory / 'root'
        self.socket = self.directory / 'larder.sock'
        self.settings = self.directory / 'config.yaml'
        self.write({'apiVersion': 'larder.dev/v1alpha1', 'kind': 'LarderConfiguration', 'root': str(self.root),
                    'backend': str(backend), 'listen': {'socket': str(self.socket)}, 'metrics': {'address': ''},
                    'registry': {'certsDirs': [str(certs)]}, **settings})
        self.listener = None
        if held:
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(str(self.socket))
            self.listener.listen(4096)
        self.server = Server(work, name, self.program, 'serve', '--config', self.settings, listener=self.listener)
        self.wait()

    def write(self, settings):
        self.settings.write_text(json.dumps(settings))

    def wait(self):
        wait_for('larder', lambda: self.call('images'))

    def call(self, *arguments):
        return run(self.program, *arguments, '--daemon', f'unix://{self.socket}')

    def data(self, *arguments):
        return json.loads(self.call(*arguments, '-o', 'json'))

    def has(self, image):
        return subprocess.run([self.program, 'inspect', image, '--daemon', f'unix://{self.socket}'], capture_output=True).returncode == 0

    def restart(self, signal_number):
        self.server.stop(signal_number)
        self.server.start()
        self.wait()

    def holder(self):
        """The process that keeps reads of incomplete layers waiting while larder does not run."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.root / 'group.sock'))
            return struct.unpack('3i', connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]

    def kill_holders(self):
        """Kills that process and its twin, which would take its place."""
        holder = self.holder()
        os.kill(holder, signal.SIGSTOP)
        for process in (*Path(f'/proc/{holder}/task/{holder}/children').read_text().split(), holder):
            os.kill(int(process), signal.SIGKILL)

    def stop(self):
        self.server.stop()
        with contextlib.suppress(OSError):  # none, if no layer is incomplete
            self.kill_holders()
