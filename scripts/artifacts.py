"""The part `artifacts` of scripts/kubelet-suite: pods of kubelet with models and ORAS files as image volumes.

The cases of kubelet's own e2e suite for image volumes are repeated with artifacts; their names are in the descriptions.
"""
import contextlib
import gzip
import hashlib
import json
import os
import re
import signal
import subprocess
import tarfile
from io import BytesIO

from cluster import Cluster, pod
from peers import MIB, Registry, random_bytes, run, wait_for

MANIFEST = 'application/vnd.oci.image.manifest.v1+json'
MODEL = 'application/vnd.cncf.model.'
LAYER, TITLE = 'application/vnd.oci.image.layer.v1.tar', 'org.opencontainers.image.title'
# The first begins as an archive does.
FILES = {'weights.bin': b'\x1f\x8b\x08\x00' + random_bytes(48 * MIB, 'weights'), 'notes.txt': b'a text file, in no archive\n', 'empty': b'',
         'run.sh': b'#!/bin/sh\necho ran\n', 'conf/model.json': b'{"layers": 12}\n', 'conf/deep/words.bin': random_bytes(100_000, 'words')}
RAW = ['weights.bin', 'notes.txt', 'empty', 'run.sh']
MODEL_RAW = {'weights.bin': 'weight', 'notes.txt': 'doc', 'run.sh': 'code'}  # and the kind of layer
WRITERS = f'''
import sys
kind, registry, name, *login = sys.argv[1:]
if kind == 'files':
    import oras.client
    client = oras.client.OrasClient(hostname=registry, insecure=True, auth_backend='basic')
    if login:
        client.auth.set_basic_auth(*login)
    client.push(target=registry + '/' + name, files={[*RAW, 'conf']})
else:
    from modelpack_client import ModelLayer, ModelPackClient, ModelPackConfig
    layers = [ModelLayer(path, '{MODEL}' + kind + '.v1.raw', 'weights/' + path) for path, kind in {MODEL_RAW}.items()]
    layers += [ModelLayer('conf', '{MODEL}weight.config.v1.tar' + suffix, 'conf' + suffix) for suffix in ('', '+gzip', '+zstd')]
    ModelPackClient(insecure=True).push(registry + '/' + name, layers, ModelPackConfig())
'''
PULL_FAILED = ('ErrImagePull', 'ImagePullBackOff')


def archive(name):
    """The directory `conf` as archive, below `name`."""
    content = BytesIO()
    with tarfile.open(fileobj=content, mode='w') as tar:
        for path, data in FILES.items():
            if path.startswith('conf/'):
                entry = tarfile.TarInfo(name + path.removeprefix('conf'))
                entry.size = len(data)
                tar.addfile(entry, BytesIO(data))
    return content.getvalue()


def push(suite, registry, kind):
    """Pushes FILES as artifact `model` of the CNCF model format, or as `files` of ORAS, by an independent writer if there is one."""
    if suite.writers:
        login = [Registry.USER, Registry.PASSWORD] if registry.private else []
        run(suite.writers, '-c', WRITERS, kind, f'127.0.0.1:{registry.port}', f'{kind}:1', *login, cwd=suite.work / 'files')
        return

    def layer(media_type, data, annotations):
        return {'mediaType': media_type, **registry.blob(kind, data), 'annotations': annotations}

    packed = archive('conf')
    if kind == 'model':
        config_type, artifact_type = f'{MODEL}config.v1+json', {'artifactType': f'{MODEL}manifest.v1+json'}
        layers = [layer(f'{MODEL}{of}.v1.raw', FILES[path], {'org.cncf.model.filepath': f'weights/{path}', 'org.cncf.model.file.metadata+json':
                                                             json.dumps({'name': path, 'mode': 0o100755 if path == 'run.sh' else 0o100644})})
                  for path, of in MODEL_RAW.items()]
        layers += [layer(f'{MODEL}weight.config.v1.tar', packed, {'org.cncf.model.filepath': 'conf'}),
                   layer(f'{MODEL}weight.config.v1.tar+gzip', gzip.compress(archive('conf+gzip')), {'org.cncf.model.filepath': 'conf+gzip'})]
    else:
        config_type, artifact_type = 'application/vnd.unknown.config.v1+json', {}
        layers = [layer(LAYER, FILES[path], {TITLE: path}) for path in RAW]
        layers.append(layer(f'{LAYER}+gzip', gzip.compress(packed), {
            TITLE: 'conf', 'io.deis.oras.content.digest': 'sha256:' + hashlib.sha256(packed).hexdigest(), 'io.deis.oras.content.unpack': 'true'}))
    put_manifest(registry, kind, '1', config_type, layers, **artifact_type)


def put_manifest(registry, repository, tag, config_type, layers, **more):
    config = {'mediaType': config_type, **registry.blob(repository, b'{}')}
    manifest = {'schemaVersion': 2, 'mediaType': MANIFEST, 'config': config, 'layers': layers, **more}
    registry.call('PUT', f'/v2/{repository}/manifests/{tag}', json.dumps(manifest).encode(), **{'Content-Type': MANIFEST})


def volume(reference, policy='IfNotPresent', sub_path='', path='/volume'):
    return reference, policy, {'mountPath': path, **({'subPath': sub_path} if sub_path else {})}


def create(suite, cluster, name, *volumes, mounted=True, secret=None, command=None):
    """A pod whose container has busybox and these image volumes."""
    body = pod(name, suite.image('user'), 'IfNotPresent', secret)
    container = body['spec']['containers'][0]
    container.update({'command': command} if command else {})
    body['spec']['volumes'] = [{'name': f'volume-{number}', 'image': {'reference': reference, 'pullPolicy': policy}}
                               for number, (reference, policy, _) in enumerate(volumes)]
    if mounted:
        container['volumeMounts'] = [{'name': f'volume-{number}', **mount} for number, (_, __, mount) in enumerate(volumes)]
    cluster.call('POST', '/api/v1/namespaces/default/pods', body)


def message_of(cluster, name):
    """The first warning of kubelet about this pod."""
    def warning():
        events = cluster.call('GET', '/api/v1/namespaces/default/events')['items']
        found = [event['message'] for event in events if event['involvedObject']['name'] == name and event['type'] == 'Warning']
        return next((message for message in found if 'Failed to pull' in message), found and found[0])
    return wait_for(f'a warning about {name}', warning)


def contrast(suite):
    """The same pods on containerd alone: they do not start, or without files."""
    with contextlib.ExitStack() as stack:
        snapshotter, suite.snapshotter = suite.snapshotter, False
        stack.callback(setattr, suite, 'snapshotter', snapshotter)
        larder, containerd = suite.runtime(stack, suite.work / 'alone-root', {})
        cluster = Cluster(suite, containerd.socket, containerd.socket)
        stack.callback(cluster.stop)
        trial = ArtifactTrial(suite, None, cluster, containerd)
        for kind in ('model', 'files'):
            state = trial.state(kind, volume(suite.image(kind)))
            suite.check('artifacts', f'containerd alone, {kind}: as docs/artifacts.md says', (state == 'Running') == (kind == 'model'), state)
            if state == 'Running':
                found = trial.shell(kind, 'busybox find /volume').split()
                suite.check('artifacts', f'containerd alone, {kind}: the pod has no files', found == ['/volume'], ' '.join(found))
            else:
                message = message_of(cluster, kind)
                suite.check('artifacts', f'containerd alone, {kind}: the pod does not start', 'mismatched image rootfs' in message, message)
        in_front = subprocess.run([larder.program, 'pull', suite.image('files'), '--daemon', f'unix://{larder.socket}'], capture_output=True, text=True)
        suite.check('artifacts', "larder in front of containerd's images: containerd refuses", 'mismatched image rootfs' in in_front.stderr)


class ArtifactTrial:
    def __init__(self, suite, larder, cluster, containerd):
        self.suite, self.larder, self.cluster, self.containerd = suite, larder, cluster, containerd
        self.model, self.files = suite.image('model'), suite.image('files')

    def check(self, description, passed, outcome=''):
        self.suite.check('artifacts', description, bool(passed), outcome)

    def create(self, name, *volumes, **options):
        create(self.suite, self.cluster, name, *volumes, **options)

    def state(self, name, *volumes, states=('Running',), **options):
        """Creates a pod, and returns the state of its container as soon as it is one of these, or a failure."""
        self.create(name, *volumes, **options)
        return self.cluster.wait_state(name, *states, *PULL_FAILED, 'ErrImageNeverPull', 'CreateContainerError', 'RunContainerError')

    def container(self, name):
        return run(*self.containerd.crictl, 'ps', '--quiet', '--label', f'io.kubernetes.pod.name={name}').split()[0]

    def shell(self, name, script):
        """The output of a script in the container of a pod, with that of errors."""
        command = [*self.containerd.crictl, 'exec', self.container(name), '/bin/busybox', 'sh', '-c', script]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=self.suite.work)
        return done.stdout + re.sub('^time=.*\n', '', done.stderr, flags=re.MULTILINE)  # messages of crictl itself

    def sums(self, name, path='/volume'):
        lines = self.shell(name, f'cd {path} && busybox find . -type f | busybox xargs busybox sha256sum').splitlines()
        return {file.removeprefix('./'): digest for digest, file in (line.split('  ', 1) for line in lines if '  ' in line)}

    def intact(self, name):
        return self.cluster.state(name) == 'Running' and self.sums(name) == self.expected['model']

    def read_files(self):
        digests = {path: hashlib.sha256(data).hexdigest() for path, data in FILES.items()}
        of_model = {f'weights/{path}': digests[path] for path in MODEL_RAW}
        for suffix in ('', '+gzip') + (('+zstd',) if self.suite.writers else ()):
            of_model |= {path.replace('conf', f'conf{suffix}', 1): digest for path, digest in digests.items() if path.startswith('conf/')}
        self.expected = {'model': of_model, 'files': digests}
        for kind in ('model', 'files'):
            state = self.state(kind, volume(self.suite.image(kind)))
            found = self.sums(kind) if state == 'Running' else state
            self.check(f'{kind}: each byte of each file', found == self.expected[kind],
                       f'{len(found)} files' if found == self.expected[kind] else str(found))
        refused = self.shell('model', 'echo x > /volume/new; echo x > /volume/weights/notes.txt; busybox rm /volume/weights/run.sh')
        self.check('model: read-only', refused.count('Read-only file system') == 3, refused.replace('\n', '; '))
        modes = self.shell('model', 'cd /volume/weights; busybox stat -c %a run.sh notes.txt; ./run.sh').split()
        self.check('model: modes, and a file that runs', modes == ['755', '644', 'ran'], ' '.join(modes))

    def conformance(self):
        """The cases of test/e2e/common/node/image_volume.go and of test/e2e_node/image_volume_test.go of Kubernetes."""
        missing = self.suite.image('missing')
        state = self.state('always', volume(self.model, 'Always'))
        self.check('e2e: should succeed with pod and pull policy of Always', state == 'Running' and self.intact('always'), state)
        state = self.state('two', volume(self.model), volume(self.files, path='/other'))
        self.check('e2e: should succeed with pod and multiple volumes', state == 'Running' and self.intact('two')
                   and self.sums('two', '/other') == self.expected['files'], state)
        state = self.state('absent', volume(missing), states=PULL_FAILED)
        self.check('e2e: should fail if image volume is not existing', state in PULL_FAILED, message_of(self.cluster, 'absent'))
        state = self.state('unused', volume(missing), mounted=False, states=('Running', *PULL_FAILED))
        self.check('e2e: should succeed if image volume is not existing but unused', state == 'Running', state)
        states = [self.state(f'same-{number}', volume(self.model)) for number in range(2)]
        self.check('e2e: should succeed with multiple pods and same image on the same node', all(self.intact(f'same-{number}') for number in range(2)),
                   ' '.join(states))
        state = self.state('sub', volume(self.model, sub_path='conf/deep'), volume(self.files, sub_path='conf', path='/other'))
        listed = self.shell('sub', 'cd /volume; busybox ls; cd /other; busybox ls').split() if state == 'Running' else []
        self.check('e2e: should succeed if subPath is a directory', listed == ['words.bin', 'deep', 'model.json'], ' '.join([state, *listed]))
        for name, path in [('sub-file', 'weights/notes.txt'), ('sub-missing', 'weights/none')]:
            state = self.state(name, volume(self.model, sub_path=path))
            self.check(f'e2e: should fail if subPath in volume is not {"a directory" if name == "sub-file" else "existing"}',
                       state == 'CreateContainerError', message_of(self.cluster, name))

    def policies(self):
        private = f'127.0.0.1:{self.suite.private.port}'
        for name, password in [('right', Registry.PASSWORD), ('wrong', 'wrong')]:
            self.cluster.create_secret(name, private, Registry.USER, password)
        for name, reference, policy, secret, expected in [
                ('never', self.files, 'Never', None, 'Running'), ('never-absent', self.suite.image('missing'), 'Never', None, 'ErrImageNeverPull'),
                ('private-wrong', f'{private}/files:1', 'IfNotPresent', 'wrong', 'ErrImagePull'),
                ('private', f'{private}/files:1', 'IfNotPresent', 'right', 'Running'),
                ('private-without', f'{private}/files:1', 'IfNotPresent', None, 'ErrImagePull')]:
            state = self.state(name, volume(reference, policy), secret=secret)
            self.check(f'policy {policy}, {name}: {expected}', state.replace('ImagePullBackOff', 'ErrImagePull') == expected, state)

    def share_pages(self):
        """Ten pods: what one has read is in memory for all, and what one gives up is gone for all."""
        for number in range(10):
            self.create(f'ten-{number}', volume(self.model))
        for number in range(10):
            self.cluster.wait_state(f'ten-{number}', 'Running')
        paths = []
        for number in range(10):
            pid = json.loads(run(*self.containerd.crictl, 'inspect', self.container(f'ten-{number}')))['info']['pid']
            paths.append(f'/proc/{pid}/root/volume/weights/weights.bin')
        resident = lambda: {int(size) for size in run('fincore', '--bytes', '--noheadings', '--output', 'RES', *paths).split()}
        forget(paths[0])
        before = resident()
        self.shell('ten-0', 'busybox cat /volume/weights/weights.bin > /dev/null')
        after, size = resident(), len(FILES['weights.bin'])
        self.check('ten pods: one page cache', before == {0} and len(after) == 1 and min(after) >= size,
                   f'{before} bytes before, {after} of {size} after one of them has read the file')

    def name_as_container(self):
        body = pod('as-image', self.files, 'IfNotPresent')
        self.cluster.call('POST', '/api/v1/namespaces/default/pods', body)
        state = self.cluster.wait_state('as-image', 'Running', *PULL_FAILED, 'CreateContainerError', 'RunContainerError')
        message = message_of(self.cluster, 'as-image')
        self.check('an artifact as image of a container: the event says so', state != 'Running' and 'is an artifact' in message, f'{state}: {message}')

    def refuse(self):
        """Artifacts that are not what they say: the event names the reason."""
        blob = self.suite.open.blob('hostile', b'content')
        for tag, layer, text in [('parent', {TITLE: '../../etc/cron.d/x'}, '../../etc/cron.d/x'), ('absolute', {TITLE: '/etc/passwd'}, '/etc/passwd'),
                                 ('huge', {'size': 200 << 30}, 'insufficient space'), ('short', {'size': 8}, 'hostile'), ('long', {'size': 6}, 'hostile')]:
            entry = {'mediaType': 'application/octet-stream', **blob, 'annotations': {TITLE: layer.pop(TITLE, 'file')}, **layer}
            put_manifest(self.suite.open, 'hostile', tag, 'application/vnd.oci.empty.v1+json', [entry])
            state = self.state(tag, volume(self.suite.image('hostile', tag)), states=PULL_FAILED)
            message = message_of(self.cluster, tag)
            self.check(f'{tag}: not pulled', state in PULL_FAILED and text in message, message)

    def restart(self):
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            for name, server in [('larder', self.larder), ('containerd', self.containerd)]:
                server.restart(signal_number)
                new = f'after-{name}-{signal_number}'.lower()
                state = self.state(new, volume(self.model))
                self.check(f'{signal_number.name} to {name}: the volumes, and a new one', self.intact('model') and state == 'Running' and self.intact(new),
                           state)

    def remove(self):
        """Removed while pods have it: they keep their files, and a new pod pulls it again."""
        refused = subprocess.run([self.larder.program, 'rm', self.model, '--daemon', f'unix://{self.larder.socket}'], capture_output=True, text=True)
        self.check('larder rm of a mounted artifact is refused', refused.returncode == 1 and 'in use by container main' in refused.stderr)
        run(*self.containerd.crictl_of(self.larder.socket), 'rmi', self.model)
        self.check('crictl rmi of a mounted artifact: the pods keep their files', not self.larder.has(self.model) and self.intact('model'))
        state = self.state('again', volume(self.model))
        self.check('crictl rmi, and pulled again', state == 'Running' and self.intact('again') and self.intact('model'), state)

    def collect(self, idle):
        """Collections retain the artifacts that pods have mounted, and remove them afterwards."""
        wait_for('the artifacts in the list of the node', lambda: {self.model, self.files} <= self.node_images(), 400)
        wait_for("kubelet's collection", lambda: not self.larder.has(idle), 400)
        self.check("kubelet's collection: a mounted artifact remains", self.larder.has(self.model) and self.larder.has(self.files) and self.intact('model'))
        self.larder.call('pull', idle)
        self.larder.call('prune', '--all', '--force')
        self.check('larder prune --all: a mounted artifact remains', not self.larder.has(idle) and self.larder.has(self.model)
                   and self.larder.has(self.files) and self.intact('model'))
        for found in self.cluster.call('GET', '/api/v1/namespaces/default/pods')['items']:
            self.cluster.delete(found['metadata']['name'])
        wait_for('the end of the containers', lambda: not run(*self.containerd.crictl, 'pods', '--quiet').strip())
        self.larder.call('prune', '--all', '--force')
        used = lambda: int(run('du', '--summarize', '--one-file-system', '--block-size=1M', self.larder.root).split()[0])
        wait_for('the removal of the layers', lambda: used() < len(FILES['weights.bin']) // MIB)
        self.check('without pods: the artifacts are removed', not self.larder.has(self.model) and not self.larder.has(self.files), f'{used()} MiB are left')

    def node_images(self):
        status = self.cluster.call('GET', '/api/v1/nodes/node')['status']
        return {name for image in status.get('images', []) for name in image['names']}


def forget(path):
    """Drops what memory has of a file."""
    with open(path, 'rb') as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_artifacts(suite):
    directory = suite.work / 'files'
    for path, data in FILES.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    (directory / 'run.sh').chmod(0o755)
    for name in ('user', 'idle'):
        suite.open.push(name, '1', {'name': name.encode()})
    for registry, kind in [(suite.open, 'model'), (suite.open, 'files'), (suite.private, 'files')]:
        push(suite, registry, kind)
    contrast(suite)
    with contextlib.ExitStack() as stack:
        snapshotter, suite.snapshotter = suite.snapshotter, True
        stack.callback(setattr, suite, 'snapshotter', snapshotter)
        larder, containerd = suite.runtime(stack, suite.work / 'artifacts-root', {'pull': {'ensuredLease': '0s'}})
        idle = suite.image('idle')
        larder.call('pull', idle)  # kubelet collects five minutes after its start, what it saw then and is not used
        cluster = Cluster(suite, containerd.socket, larder.socket, imageGCHighThresholdPercent=2, imageGCLowThresholdPercent=1, imageMinimumGCAge='1s')
        stack.callback(cluster.stop)
        trial = ArtifactTrial(suite, larder, cluster, containerd)
        for step in (trial.read_files, trial.share_pages, trial.conformance, trial.policies, trial.name_as_container, trial.refuse, trial.restart, trial.remove):
            step()
        trial.collect(idle)
