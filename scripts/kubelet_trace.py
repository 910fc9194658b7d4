"""The part `trace` of scripts/kubelet-suite: kubelet's trace of a pod's start continues in larder, down to the layers of its image."""
import contextlib
import json
import socket

from peers import MIB, Server, free_port, random_bytes, wait_for

PULL = 'runtime.v1.ImageService/PullImage'
FETCH = 'pkg.unpack.unpacker.fetchLayer'
# What larder's spans of a pull are called, each with its parent.
STAGES = {'pull.Pull': PULL, 'pull.Wait': 'pull.Pull', 'pull.Resolve': 'pull.Pull', FETCH: 'pull.Pull', 'pkg.unpack.unpacker.unpackLayer': FETCH,
          'pull.MergeLayer': 'pull.Pull', 'pull.pull.createNewImage': 'pull.Pull', 'remotes.docker.resolver.HTTPRequest': 'pull.Resolve'}
SHOWN = ('image.ref', 'image.digest', 'larder.layers', 'larder.wait.reason', 'layer.media.digest', 'layer.media.size', 'http.response.status_code', 'url.path')


class Trace:
    """The spans of one trace, in the order of their start."""

    def __init__(self, spans):
        self.spans = sorted(spans, key=lambda span: (span['start'], -span['end']))
        self.by_id = {span['id']: span for span in self.spans}

    def path(self, span):
        """From the first span of the trace to this one."""
        return (self.path(self.by_id[span['parent']]) if span['parent'] in self.by_id else []) + [span]

    def tree(self, span, depth=0):
        attributes = ' '.join(f'{name}={shorten(span["attributes"][name])}' for name in SHOWN if name in span['attributes'])
        name, milliseconds = '  ' * depth + span['name'], (span['end'] - span['start']) / 1e6
        print(f'       {name:<62}{milliseconds:>8.1f} ms  {span["service"]:<8} {attributes}'.rstrip())
        for below in self.spans:
            if below['parent'] == span['id']:
                self.tree(below, depth + 1)


def shorten(value):
    before, digest, after = value.partition('sha256:')
    return before + digest + after[:12]


def run_trace(suite):
    port = free_port()
    receiver = Server(suite.work, 'otlp-receiver', suite.larder.with_name('larder-otlp-receiver'), port)
    wait_for('the receiver of traces', lambda: socket.create_connection(('127.0.0.1', port)))
    suite.open.push('traced', '1', {'data': random_bytes(4 * MIB, 'traced')})
    image, endpoint = suite.image('traced'), f'127.0.0.1:{port}'
    # Larder's own store has layers to fetch; and larder begins no trace itself.
    snapshotter, suite.snapshotter = suite.snapshotter, True
    with contextlib.ExitStack() as stack:
        stack.callback(receiver.stop)
        stack.callback(setattr, suite, 'snapshotter', snapshotter)
        _, cluster, __ = stack.enter_context(suite.node({'tracing': {'endpoint': endpoint, 'samplingRatePerMillion': 0}},
                                                        root=suite.work / 'trace-root',
                                                        tracing={'endpoint': endpoint, 'samplingRatePerMillion': 1_000_000}))
        cluster.create('traced', image, 'IfNotPresent')
        cluster.wait_state('traced', 'Running')
        trace = wait_for('the spans of kubelet and larder', lambda: whole_trace(receiver, image))
    pull = pull_of(trace, image)
    callers = trace.path(pull)[:-1]
    suite.check('trace', "larder's call is below kubelet's, in one trace", bool(callers) and callers[-1]['kind'] == 'client'
                and {each['service'] for each in callers} == {'kubelet'}, ' > '.join(each['name'] for each in callers))
    below = [span for span in trace.spans if pull in trace.path(span)[:-1]]
    for name, parent in STAGES.items():
        found = [span for span in below if span['name'] == name and trace.by_id[span['parent']]['name'] == parent]
        suite.check('trace', f'{name} below {parent}', bool(found) and all(span['service'] == 'larder' for span in found), f'{len(found)} spans')
    trace.tree(trace.path(pull)[0])


def pull_of(trace, image):
    return next((span for span in trace.spans if span['name'] == PULL and span['service'] == 'larder'
                 and any(below['attributes'].get('image.ref') == image for below in trace.spans if below['parent'] == span['id'])), None)


def whole_trace(receiver, image):
    """The trace in which larder pulled the image, as soon as kubelet's first span of it has come as well."""
    spans = [json.loads(line) for line in receiver.log.read_text().splitlines() if line.startswith('{')]
    for number in {span['trace'] for span in spans}:
        trace = Trace([span for span in spans if span['trace'] == number])
        pull = pull_of(trace, image)
        if pull and trace.path(pull)[0]['parent'] == '':
            return trace
    return None
