"""A headless Chromium, driven through chromedriver by plain HTTP, for scripts/dashboard-check."""
import base64, json, os, socket, subprocess, time, urllib.error, urllib.request

ELEMENT = 'element-6066-11e4-a52e-4f735466cecf'
KEYS = {'Tab': '\ue004', 'Enter': '\ue007', 'Escape': '\ue00c', 'Shift': '\ue008'}
# Nothing of the browser's own may use the network.
FLAGS = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
         '--disable-component-update', '--disable-sync', '--disable-dev-shm-usage', '--no-proxy-server', '--hide-scrollbars']


class Browser:
    """One session with a profile of its own in `work`; `names` are host names that lead to this machine."""

    def __init__(self, work, names=()):
        self.profile = work + '/profile'
        self.log = work + '/chromedriver.log'
        self.rules = ', '.join(f'MAP {name} 127.0.0.1' for name in names)

    def __enter__(self):
        with socket.create_server(('127.0.0.1', 0)) as free:
            port = free.getsockname()[1]
        log = open(self.log, 'w')
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith('_proxy')}
        self.process = subprocess.Popen(['chromedriver', f'--port={port}'], stdout=log, stderr=log, env=environment)
        log.close()
        self.base = f'http://127.0.0.1:{port}'
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            wait('chromedriver', self._ready)
            flags = [*FLAGS, f'--user-data-dir={self.profile}', f'--host-resolver-rules={self.rules}']
            wanted = {'browserName': 'chrome', 'goog:chromeOptions': {'args': flags},
                      'goog:loggingPrefs': {'performance': 'ALL', 'browser': 'ALL'}}
            session = self._send('POST', '/session', {'capabilities': {'alwaysMatch': wanted}})
            self.base += '/session/' + session['sessionId']
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_):
        try:
            self._send('DELETE', '')
        finally:
            self._stop()

    def _stop(self):
        self.process.terminate()
        self.process.wait(30)

    def _ready(self):
        try:
            return self._send('GET', '/status')['ready']
        except OSError:
            return False

    def _send(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {'Content-Type': 'application/json'}, method=method)
        try:
            with self.opener.open(request, timeout=120) as answer:
                return json.load(answer)['value']
        except urllib.error.HTTPError as error:
            value = json.load(error)['value']
            raise RuntimeError(f'{path}: {value["error"]}: {value["message"][:600]}') from None

    def go(self, url):
        self._send('POST', '/url', {'url': url})

    def size(self, width, height):
        self._send('POST', '/window/rect', {'width': width, 'height': height})

    def run(self, script, *arguments):
        """What a function body returns; a promise is waited for."""
        return self._send('POST', '/execute/sync', {'script': script, 'args': list(arguments)})

    def text(self, selector):
        return self.run('return document.querySelector(arguments[0])?.innerText ?? null', selector)

    def texts(self, selector):
        return self.run('return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)', selector)

    def count(self, selector):
        return self.run('return document.querySelectorAll(arguments[0]).length', selector)

    def keys(self, *keys):
        """Presses keys one after the other, such as `Tab` or a letter."""
        pressed = [{'type': kind, 'value': KEYS.get(key, key)} for key in keys for kind in ('keyDown', 'keyUp')]
        self._send('POST', '/actions', {'actions': [{'type': 'key', 'id': 'keyboard', 'actions': pressed}]})

    def command(self, name, **parameters):
        """A command of the browser's own protocol."""
        return self._send('POST', '/goog/cdp/execute', {'cmd': name, 'params': parameters})

    def prefer(self, **features):
        """What the user prefers: `prefers_color_scheme='dark'`."""
        features = [{'name': name.replace('_', '-'), 'value': value} for name, value in features.items()]
        self.command('Emulation.setEmulatedMedia', features=features)

    def picture(self, path):
        with open(path, 'wb') as f:
            f.write(base64.b64decode(self._send('GET', '/screenshot')))

    def console(self):
        """What the console said since the last call."""
        return [entry['message'] for entry in self._send('POST', '/se/log', {'type': 'browser'})]

    def network(self):
        """Events of the network since the last call: name and parameters."""
        messages = [json.loads(entry['message'])['message'] for entry in self._send('POST', '/se/log', {'type': 'performance'})]
        return [(message['method'], message['params']) for message in messages if message['method'].startswith('Network.')]


def wait(what, condition, seconds=30):
    """The first value of the condition that counts as true."""
    until = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            raise RuntimeError(f'waited {seconds} s in vain for: {what}')
        time.sleep(0.1)
