"""The DaemonSet of packaging/kubernetes on a real node: a part of kubelet-suite.

The directories of the host that the manifest names are bind mounts here, so that the pod gets its own paths and this machine's are
not touched. What a cluster has besides API server and kubelet is done here: the pod that the DaemonSet controller creates and the
scheduler binds, the address of the service "kubernetes", and the ConfigMap with the cluster's authority.
"""
import contextlib
import copy
import json
import shutil
import subprocess
import time
from pathlib import Path

from cluster import SERVICE_ADDRESS, Cluster, container
from peers import MIB, Containerd, random_bytes, run, unmount_below, wait_for

MANIFESTS = Path(__file__).resolve().parent.parent / 'packaging/kubernetes'
NAMESPACE, POD = 'larder-system', 'larder-suite'
SOCKET = '/run/larder/larder.sock'
# As the DaemonSet controller adds them; the pod uses the network of the host.
TOLERATED = [('not-ready', 'NoExecute'), ('unreachable', 'NoExecute'), ('disk-pressure', 'NoSchedule'), ('memory-pressure', 'NoSchedule'),
             ('pid-pressure', 'NoSchedule'), ('unschedulable', 'NoSchedule'), ('network-unavailable', 'NoSchedule')]


@contextlib.contextmanager
def bound(sources):
    """Bind mounts of these directories over those of the host; missing ones are made, and removed again."""
    made = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [directory.rmdir() for directory in reversed(made)])
        for place, source in sources.items():
            for directory in [*reversed(place.parents), place]:
                if not directory.exists():
                    directory.mkdir()
                    made.append(directory)
            run('mount', '--bind', source, place)
            stack.callback(run, 'umount', '--lazy', place)
        yield


@contextlib.contextmanager
def service_address():
    """The API server itself has the address of its service: there is no kube-proxy."""
    run('ip', 'address', 'add', f'{SERVICE_ADDRESS}/32', 'dev', 'lo')
    try:
        yield
    finally:
        run('ip', 'address', 'delete', f'{SERVICE_ADDRESS}/32', 'dev', 'lo')


class KubeadmNode:
    """A node with the paths of kubeadm, whose kubelet asks containerd for images."""

    def __init__(self, suite, stack):
        self.suite, self.work = suite, suite.work
        places = [Path('/', name) for name in ('var/lib/containerd', 'var/lib/larder', 'run/larder', 'etc/kubernetes', 'var/lib/kubelet')]
        sources = {place: self.work / 'host' / place.relative_to('/') for place in places}
        for source in sources.values():
            source.mkdir(parents=True)
        stack.callback(shutil.rmtree, self.work / 'host')
        stack.enter_context(service_address())
        stack.enter_context(bound(sources))
        self.containerd = Containerd(suite.peers, self.work, Path('/var/lib/containerd'), suite.certs)
        stack.callback(shutil.rmtree, self.containerd.state)
        stack.callback(unmount_below, self.containerd.state)
        stack.enter_context(bound({Path('/run/containerd'): self.containerd.state}))
        stack.callback(self.containerd.stop)
        self.socket = Path('/run/containerd/containerd.sock')
        self.cluster = Cluster(suite, self.socket, self.socket, authorizers='Node,RBAC', server=(SERVICE_ADDRESS, 443),
                               kubelet_flags=[f'--node-ip={SERVICE_ADDRESS}'], pki=Path('/var/lib/kubelet/pki'), address=SERVICE_ADDRESS,
                               authentication={'anonymous': {'enabled': True}, 'webhook': {'enabled': False}},  # for kubectl exec
                               staticPodPath='/etc/kubernetes/manifests')
        stack.callback(self.cluster.stop)
        shutil.copy(self.work / 'kubeconfig', '/etc/kubernetes/kubelet.conf')

    def kubectl(self, *arguments, **options):
        return run(self.suite.peers / 'kubectl', '--kubeconfig', self.cluster.administrator, '--cache-dir', self.work / 'kubectl-cache', *arguments,
                   **options)

    def get(self, *arguments):
        return json.loads(self.kubectl('get', *arguments, '-o', 'json'))

    def apply(self, overlay):
        self.kubectl('apply', '--validate=strict', '-k', MANIFESTS / 'overlays' / overlay)

    def create_authorities(self, pod):
        """The ConfigMaps of certificates that admission adds to a pod: a controller makes them in each namespace."""
        present = self.kubectl('get', 'configmaps', '-n', NAMESPACE, '-o', 'name')
        projected = [source for volume in pod['spec']['volumes'] for source in volume.get('projected', {}).get('sources', [])]
        for config_map in (source['configMap'] for source in projected if 'configMap' in source):
            if f'configmap/{config_map["name"]}' not in present.split():
                files = [f'--from-file={item["key"]}={self.cluster.certificates.authority}' for item in config_map['items']]
                self.kubectl('create', 'configmap', config_map['name'], '-n', NAMESPACE, *files)


class AgentPod:
    """The pod of larder on the node, as the DaemonSet controller and the scheduler make it."""

    FINALIZER = 'suite.invalid/keep-status'

    def __init__(self, node):
        self.node = node
        daemonset = node.get('daemonset', 'larder', '-n', NAMESPACE)
        template = copy.deepcopy(daemonset['spec']['template'])
        spec = template['spec']
        for term in spec['affinity']['nodeAffinity']['requiredDuringSchedulingIgnoredDuringExecution']['nodeSelectorTerms']:
            term['matchFields'] = [{'key': 'metadata.name', 'operator': 'In', 'values': ['node']}]
        spec['tolerations'] = spec.get('tolerations', []) + [
            {'key': f'node.kubernetes.io/{key}', 'operator': 'Exists', 'effect': effect} for key, effect in TOLERATED]
        spec['nodeName'] = 'node'
        owner = {'apiVersion': 'apps/v1', 'kind': 'DaemonSet', 'name': 'larder', 'uid': daemonset['metadata']['uid'], 'controller': True,
                 'blockOwnerDeletion': True}
        metadata = {'name': POD, 'namespace': NAMESPACE, 'labels': template['metadata']['labels'], 'ownerReferences': [owner],
                    'annotations': template['metadata'].get('annotations', {}), 'finalizers': [self.FINALIZER]}
        node.kubectl('create', '-f', '-', input=json.dumps({'apiVersion': 'v1', 'kind': 'Pod', 'metadata': metadata, 'spec': spec}))
        self.created = time.monotonic()
        node.create_authorities(self.object())

    def object(self):
        return self.node.get('pod', POD, '-n', NAMESPACE)

    def wait_ready(self):
        """The seconds until its probes passed."""
        def is_ready():
            conditions = self.object()['status'].get('conditions', [])
            return any(condition['type'] == 'Ready' and condition['status'] == 'True' for condition in conditions)
        wait_for('the pod of larder is ready', is_ready)
        return time.monotonic() - self.created

    def call(self, *arguments):
        return self.node.kubectl('exec', '-n', NAMESPACE, POD, '--', 'larder', *arguments)

    def delete(self):
        """Deletes it as a rollout does. Returns the end of its container and the seconds until it."""
        started = time.monotonic()
        self.node.kubectl('delete', 'pod', POD, '-n', NAMESPACE, '--wait=false')
        ended = wait_for('the end of the pod of larder', lambda: self.object()['status']['containerStatuses'][0]['state'].get('terminated'))
        seconds = time.monotonic() - started
        self.node.kubectl('patch', 'pod', POD, '-n', NAMESPACE, '--type=merge', '-p', '{"metadata": {"finalizers": null}}')
        self.node.kubectl('wait', '--for=delete', f'pod/{POD}', '-n', NAMESPACE, '--timeout=60s')
        return ended, seconds

    def describe(self):
        """For a report of what went wrong."""
        arguments = [('describe', 'pod', POD), ('logs', POD, '--tail=30')]
        for command in arguments:
            with contextlib.suppress(subprocess.CalledProcessError):
                print(self.node.kubectl(*command, '-n', NAMESPACE))


def image_set(name, *images):
    return {'apiVersion': 'images.larder.dev/v1alpha1', 'kind': 'ImageSet', 'metadata': {'name': name},
            'spec': {'images': [{'image': image} for image in images], 'policy': 'KeepPresent'}}


def show_sets(node, check, present):
    """Prints what an operator sees of one set that is ready and of one with an image that no registry has."""
    missing = f'{present}-missing'
    node.kubectl('create', '-f', '-', input=json.dumps(image_set('failing', present, missing)))
    node.kubectl('wait', '--for=jsonpath={.status.failing}=1', 'imageset/failing', '--timeout=90s')
    events = ('get', 'events', '--all-namespaces', '--field-selector=involvedObject.kind=ImageSet')
    wait_for('an event about the failing set', lambda: 'imageset/failing' in node.kubectl(*events))
    for arguments in (('get', 'imageset'), ('get', 'nodeimages'), ('describe', 'imageset', 'failing'), events):
        print(f'$ kubectl {" ".join(arguments)}\n{node.kubectl(*arguments)}')
    described = node.kubectl('describe', 'imageset', 'failing')
    check('kubectl describe names the node, the image and the cause', all(text in described for text in ('node', missing, 'not found')))
    node.kubectl('delete', 'imageset', 'failing')


def run_daemonset(suite):
    for name in ('ahead-init', 'ahead', 'kept'):
        suite.open.push(name, '1', {'name': name.encode(), 'data': random_bytes(4 * MIB, f'daemonset {name}')})
    first, second, kept = (suite.image(name) for name in ('ahead-init', 'ahead', 'kept'))

    def check(description, passed, outcome=''):
        suite.check('daemonset', description, passed, outcome)

    with contextlib.ExitStack() as stack:
        node = KubeadmNode(suite, stack)
        node.containerd.ctr('images', 'import', suite.larder_image)
        node.apply('default')
        agent = AgentPod(node)
        stack.callback(lambda: suite.failed and agent.describe())
        try:
            seconds = agent.wait_ready()
        except TimeoutError:
            agent.describe()
            raise
        restarts = agent.object()['status']['containerStatuses'][0]['restartCount']
        check('the pod of the overlay "default" is ready, by its probes', restarts == 0, f'after {seconds:.1f} s, {restarts} restarts')
        print(agent.call('kube', 'check'))
        check('`larder kube check` in the pod exits with 0', True)
        print(run(suite.larder, 'status', '--daemon', f'unix://{SOCKET}'))
        check('`larder status` of the host, over the socket', 'connected since' in agent.call('status'))
        suite.show_timeline(agent, node.cluster, 'ahead', second, {'initContainers': [container('init', first, 'sleep', '3')],
                                                                   'containers': [container('main', second)]}, part='daemonset')
        node.kubectl('create', '-f', '-', input=json.dumps(image_set('web', kept)))
        node.kubectl('wait', '--for=condition=Ready', 'imageset/web', '--timeout=90s')
        check('an ImageSet is ready on the node', True, node.kubectl('get', 'imageset', 'web', '--no-headers').strip())
        check('its image is in containerd', kept in node.containerd.ctr('images', 'ls', '-q'))
        show_sets(node, check, kept)
        ended, seconds = agent.delete()
        check('a deleted pod stops', ended['exitCode'] == 0, f'exit code {ended["exitCode"]} ({ended.get("reason")}) after {seconds:.1f} s')
        present = node.containerd.ctr('images', 'ls', '-q')
        check('its images are still in containerd', all(image in present for image in (first, second, kept)))
        check('the pod whose image it pulled runs on', node.cluster.state('ahead') == 'Running')
        agent = AgentPod(node)
        agent.wait_ready()
        check('the next pod of larder is ready, and retains the image of the set', 'web' in agent.call('explain', kept))
