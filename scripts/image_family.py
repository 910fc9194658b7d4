"""A registry of its own with images that share layers, for scripts/gc-truth.

Forty applications over one base and two runtimes; each fifth is instead a model: an artifact of files. The content is generated from a seed and does not compress, so that sizes on disk
are those of the archives on every filesystem.
"""
import gzip, hashlib, http.client, io, json, os, random, socket, subprocess, tarfile, time

MEDIA = 'application/vnd.oci.image.'


class Registry:
    """Debian's docker-registry on a free port of this machine, with its data in `work`."""

    def __init__(self, work):
        self.work = work

    def __enter__(self):
        with socket.create_server(('127.0.0.1', 0)) as free:
            self.address = '127.0.0.1:%d' % free.getsockname()[1]
        config = self.work + '/registry.yml'
        with open(config, 'w') as f:
            f.write(f'version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\nhttp: {{addr: "{self.address}"}}\n'
                    f'storage: {{filesystem: {{rootdirectory: {self.work}/registry}}}}\n')
        self.log = open(self.work + '/registry.log', 'w')
        self.process = subprocess.Popen(['docker-registry', 'serve', config], stdout=self.log, stderr=self.log)
        for _ in range(200):
            try:
                if self.call('GET', '/v2/')[0] == 200:
                    return self
            except OSError:
                time.sleep(0.05)
        self.__exit__()
        raise RuntimeError('the registry did not start: ' + open(self.work + '/registry.log').read()[-500:])

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(30)
        self.log.close()

    def call(self, method, path, body=None, kind='application/octet-stream'):
        connection = http.client.HTTPConnection(self.address, timeout=60)
        connection.request(method, path, body, {'Content-Type': kind} if body is not None else {})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status, answer.getheader('Location')

    def expect(self, status, method, path, *more):
        got, location = self.call(method, path, *more)
        if got != status:
            raise RuntimeError(f'{method} {path}: {got}')
        return location

    def push_blob(self, repository, data):
        digest = 'sha256:' + hashlib.sha256(data).hexdigest()
        if self.call('HEAD', f'/v2/{repository}/blobs/{digest}')[0] != 200:
            location = self.expect(202, 'POST', f'/v2/{repository}/blobs/uploads/', b'')
            path = location.split(self.address, 1)[-1]
            self.expect(201, 'PUT', f'{path}{"&" if "?" in path else "?"}digest={digest}', data)
        return {'digest': digest, 'size': len(data)}

    def push_image(self, repository, layers, architecture='amd64'):
        config = {'architecture': architecture, 'os': 'linux', 'config': {'Cmd': ['/bin/app']},
                  'rootfs': {'type': 'layers', 'diff_ids': [diff_id for _, diff_id in layers]}}
        manifest = {'schemaVersion': 2, 'mediaType': MEDIA + 'manifest.v1+json',
                    'config': dict(self.push_blob(repository, json.dumps(config).encode()), mediaType=MEDIA + 'config.v1+json'),
                    'layers': [dict(self.push_blob(repository, data), mediaType=MEDIA + 'layer.v1.tar+gzip') for data, _ in layers]}
        self.expect(201, 'PUT', f'/v2/{repository}/manifests/1', json.dumps(manifest).encode(), manifest['mediaType'])


    def push_artifact(self, repository, files):
        """An artifact of files: path -> content."""
        def pushed(path, data):
            return dict(self.push_blob(repository, data), mediaType='application/vnd.cncf.model.weight.v1.raw', annotations={'org.cncf.model.filepath': path})
        manifest = {'schemaVersion': 2, 'mediaType': MEDIA + 'manifest.v1+json', 'artifactType': 'application/vnd.cncf.model.manifest.v1+json',
                    'config': dict(self.push_blob(repository, b'{}'), mediaType='application/vnd.oci.empty.v1+json'),
                    'layers': [pushed(path, data) for path, data in files.items()]}
        self.expect(201, 'PUT', f'/v2/{repository}/manifests/1', json.dumps(manifest).encode(), manifest['mediaType'])


def layer(rng, name, files, size):
    """An archive with so many files of different sizes, and its diff ID."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode='w', format=tarfile.PAX_FORMAT) as tar:
        for number in range(files):
            data = rng.randbytes(rng.randrange(2 * size // files))
            entry = tarfile.TarInfo(f'srv/{name}/{number % 16:x}/part-{number}')
            entry.size, entry.mtime = len(data), 1700000000
            tar.addfile(entry, io.BytesIO(data))
    return gzip.compress(plain.getvalue(), 1, mtime=0), 'sha256:' + hashlib.sha256(plain.getvalue()).hexdigest()


def push_family(registry, seed, pattern, count):
    """Pushes the images with the names of the pattern."""
    rng = random.Random(seed)
    base = layer(rng, 'base', 3000, 60_000_000)
    runtimes = [layer(rng, f'runtime-{number}', 200, 50_000_000) for number in range(2)]
    weights = [rng.randbytes(30_000_000) for _ in range(2)]
    for number in range(count):
        if number % 5 == 4:
            own = rng.randbytes(rng.randrange(1_000_000, 12_000_000))
            registry.push_artifact(pattern.format(number).rsplit(':', 1)[0], {'weights/shared': weights[number % 2], 'own': own})
            continue
        own = layer(rng, f'app-{number}', 20, rng.randrange(1_000_000, 12_000_000))
        registry.push_image(pattern.format(number).rsplit(':', 1)[0], [base, runtimes[number % 2], own])


def many_images(work, count):
    """Archives of a thousand images each, one at a time in one file: over 40 shared layers, each image with one of 400 layers more."""
    rng = random.Random(1)
    layers = [layer(rng, f'many-{number}', 1, 8000) for number in range(440)]
    path = work + '/many.tar'
    for first in range(0, count, 1000):
        write_layout(path, layers, range(first, min(first + 1000, count)))
        yield path
    os.remove(path)


def write_layout(path, layers, numbers):
    """An archive of an OCI layout with the images of these numbers."""
    index = []
    with tarfile.open(path, 'w') as tar:
        def add(name, data):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))

        def blob(data):
            digest = hashlib.sha256(data).hexdigest()
            add('blobs/sha256/' + digest, data)
            return {'digest': 'sha256:' + digest, 'size': len(data)}
        blobs = [dict(blob(data), mediaType=MEDIA + 'layer.v1.tar+gzip') for data, _ in layers]
        for number in numbers:
            chosen = [number % 40, 40 + number % 400]
            config = {'architecture': 'amd64', 'os': 'linux', 'created': '2026-01-01T00:00:00Z', 'config': {'Labels': {'number': str(number)}},
                      'rootfs': {'type': 'layers', 'diff_ids': [layers[each][1] for each in chosen]}}
            manifest = {'schemaVersion': 2, 'mediaType': MEDIA + 'manifest.v1+json',
                        'config': dict(blob(json.dumps(config).encode()), mediaType=MEDIA + 'config.v1+json'),
                        'layers': [blobs[each] for each in chosen]}
            name = {'org.opencontainers.image.ref.name': f'registry.example/team-{number % 97}/app-{number:05}:1'}
            index.append(dict(blob(json.dumps(manifest).encode()), mediaType=manifest['mediaType'], annotations=name))
        add('index.json', json.dumps({'schemaVersion': 2, 'manifests': index}).encode())
        add('oci-layout', b'{"imageLayoutVersion": "1.0.0"}')
