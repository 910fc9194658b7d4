"""Seconds that kubelet and its pods wait, beside containerd alone in the same run, for scripts/kubelet-suite."""
import concurrent.futures
import contextlib
import json
import shutil
import signal
import statistics
import time

from cluster import Cluster
from peers import MIB, PAUSE, Containerd, random_bytes, run, unmount_below, wait_for

KINDS = ('containerd', 'larder')
FIFTHS, SAMPLES = 5, 20
SLACK = 3.0  # seconds: what a scheduler of two cores adds to a burst of pods


@contextlib.contextmanager
def runtime(suite, kind, name):
    """containerd with its own snapshots, or with those of larder's store: (larder or None, containerd, crictl)."""
    root = suite.work / f'{name}-{kind}-root'
    with contextlib.ExitStack() as stack:
        if kind == 'larder':
            snapshotter, suite.snapshotter = suite.snapshotter, True
            stack.callback(setattr, suite, 'snapshotter', snapshotter)
            larder, containerd = suite.runtime(stack, root, {}, held=True)
        else:
            larder, containerd = None, Containerd(suite.peers, suite.work, root, suite.certs)
            stack.callback(shutil.rmtree, containerd.state)
            stack.callback(unmount_below, containerd.state)
            stack.callback(containerd.stop)
        yield larder, containerd, containerd.crictl_of((larder or containerd).socket)


def seconds(call, *arguments):
    began = time.monotonic()
    call(*arguments)
    return time.monotonic() - began


def run_tags(suite):
    """Medians of a pull by fifths, while one image gets so many tags."""
    medians = {}
    digest = suite.open.push('tagged', 'first', {'name': b'tagged'})
    kind = 'application/vnd.oci.image.manifest.v1+json'
    manifest = suite.open.call('GET', f'/v2/tagged/manifests/{digest}', None, Accept=kind).read()
    for number in range(suite.tags):
        suite.open.call('PUT', f'/v2/tagged/manifests/{number}', manifest, **{'Content-Type': kind})
    for kind in KINDS:
        with runtime(suite, kind, 'tags') as (_, __, crictl), concurrent.futures.ThreadPoolExecutor(4) as pool:
            pull = lambda number: run(*crictl, 'pull', suite.image('tagged', number))
            pull('first')
            numbers, medians[kind] = iter(range(suite.tags)), []
            for _ in range(FIFTHS):
                list(pool.map(pull, [next(numbers) for _ in range(suite.tags // FIFTHS - SAMPLES)]))
                time.sleep(2)  # comparisons of the changes
                medians[kind].append(statistics.median(seconds(pull, next(numbers)) for _ in range(SAMPLES)))
        suite.check('tags', f'a pull by fifths of {suite.tags} tags, {kind}', True, ', '.join(f'{median:.2f}' for median in medians[kind]) + ' s')
    suite.check('tags', 'no fifth takes 1.5 times as long as the first', max(medians['larder']) < 1.5 * medians['larder'][0])


def run_lists(suite):
    """Images in the first list after a restart."""
    for number in range(suite.images):
        suite.open.push(f'listed-{number}', '1', {'name': f'{number}'.encode()})
    with runtime(suite, 'larder', 'lists') as (larder, containerd, crictl):
        larder.call('pull', *(suite.image(f'listed-{number}') for number in range(suite.images)))
        count = lambda: len(run(*crictl, 'images', '-q').split())
        all_images = wait_for('all images', lambda: count() >= suite.images and count())
        for name, restart in [('SIGTERM to larder', lambda: larder.server.signal(signal.SIGTERM)), ('SIGKILL to larder', lambda: larder.server.signal(signal.SIGKILL)),
                              ('SIGTERM to containerd', lambda: containerd.restart(signal.SIGTERM)),
                              ('both', lambda: (larder.server.signal(signal.SIGTERM), containerd.restart(signal.SIGKILL)))]:
            restart()
            began = time.monotonic()
            first, answered = count(), time.monotonic() - began
            whole = wait_for('all images', lambda: count() == all_images and time.monotonic() - began)
            suite.check('lists', f'{name}: images in the first list, of {all_images}', first == all_images,
                        f'{first}, after {answered:.2f} s; all after {whole:.2f} s')


def run_small(suite):
    """Seconds from the pull of a small image to its running container."""
    for number in range(SAMPLES):
        suite.open.push(f'small-{number}', '1', {'data': random_bytes(8 * MIB, f'small {number}')})
    times = {}
    with contextlib.ExitStack() as stack:
        for kind in KINDS:
            with runtime(suite, kind, 'small') as (_, __, crictl):
                sandbox, container = suite.work / 'sandbox.json', suite.work / 'container.json'
                metadata = {'name': 'small', 'namespace': 'default', 'uid': 'small', 'attempt': 0}
                sandbox.write_text(json.dumps({'metadata': metadata, 'log_directory': str(suite.work), 'linux': {
                    'security_context': {'namespace_options': {'network': 2}}}}))
                run(*crictl, 'pull', PAUSE)
                pod, times[kind] = run(*crictl, 'runp', sandbox).strip(), []
                for number in range(SAMPLES):
                    image = suite.image(f'small-{number}')
                    container.write_text(json.dumps({'metadata': {'name': f'small-{number}'}, 'image': {'image': image}, 'log_path': 'small.log',
                                                     'linux': {}}))
                    began = time.monotonic()
                    run(*crictl, 'pull', image)
                    pulled = time.monotonic()
                    run(*crictl, 'start', run(*crictl, 'create', '--no-pull', pod, container, sandbox).strip())
                    times[kind].append((pulled - began, time.monotonic() - began))
    medians = {kind: [statistics.median(row[at] for row in rows) for at in range(2)] for kind, rows in times.items()}
    for kind, (pulled, running) in medians.items():
        suite.check('small', f'8 MB, {kind}', True, f'pulled after {pulled:.3f} s, running after {running:.3f} s')
    suite.check('small', 'not slower than containerd alone', medians['larder'][1] <= medians['containerd'][1] * 1.02)


def run_signals(suite):
    """Seconds until 20 pods of 5 images run, while what runs them is stopped or killed."""
    for number in range(5):
        suite.open.push(f'burst-{number}', '1', {'data': random_bytes(40 * MIB, f'burst {number}')})
    table = {}
    for kind in KINDS:
        with runtime(suite, kind, 'signals') as (larder, containerd, crictl), contextlib.ExitStack() as stack:
            cluster = Cluster(suite, containerd.socket, (larder or containerd).socket)
            stack.callback(cluster.stop)
            run(*crictl, 'pull', PAUSE)
            kubelet = cluster.servers[-1]
            servers = {'larder': larder and larder.server, 'containerd': containerd.server, 'kubelet': kubelet}
            for victims in [(), *((name,) for name in servers), tuple(servers)]:
                present = [servers[name] for name in victims if servers[name]]
                if victims and not present:
                    continue
                for number in (signal.SIGTERM, signal.SIGKILL) if victims else (None,):
                    key = (' + '.join(victims) if len(victims) < 3 else 'all', number.name if number else 'undisturbed')
                    table[key, kind] = burst(suite, cluster, crictl, present, number)
                    print(f'       {kind}: {" ".join(key)}: {table[key, kind]:.1f} s', flush=True)
    for key in {key: None for key, _ in table}:
        times = {kind: table[key, kind] for kind in KINDS if (key, kind) in table}
        # A signal to larder is beside the undisturbed run of containerd, or a kill of it.
        beside = times.get('containerd') or table[('', 'undisturbed'), 'containerd']
        suite.check('signals', f'20 pods of 5 images run, {" ".join(key).strip()}', times['larder'] <= beside + SLACK,
                    ', '.join(f'{kind} {value:.1f} s' for kind, value in times.items()))


def burst(suite, cluster, crictl, victims, number):
    names = [f'burst-{pod}' for pod in range(20)]
    began = time.monotonic()
    for at, name in enumerate(names):
        cluster.create(name, suite.image(f'burst-{at % 5}'), 'IfNotPresent')
    time.sleep(max(0, began + 2 - time.monotonic()))
    for server in victims:
        server.process.send_signal(number)
    for server in victims:
        server.signal(number)
    kubelet = cluster.servers[-1]
    pods = lambda: cluster.call('GET', '/api/v1/namespaces/default/pods')['items']
    runs = lambda pod: any('running' in status['state'] for status in pod['status'].get('containerStatuses', []))

    def all_run():
        if kubelet.process.poll() is not None:  # it exits while containerd does not serve
            kubelet.start()
        return all(runs(pod) for pod in pods())

    wait_for('all pods', all_run, 180)
    took = time.monotonic() - began
    for name in names:
        cluster.delete(name)
    wait_for('no pods', lambda: not pods())
    wait_for('no containers', lambda: not run(*crictl, 'pods', '-q').split())
    for at in range(5):
        wait_for('no image', lambda: run(*crictl, 'rmi', suite.image(f'burst-{at}')) or True)
    return took
