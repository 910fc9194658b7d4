"""A Kubernetes cluster of one node on this machine: etcd, kube-apiserver and kubelet, for the suites of larder.

As kubeadm sets it up, but for what a controller manager, a scheduler and kube-proxy do. Every server listens on loopback.
"""
import base64
import json
import shutil
import ssl
import urllib.request

from peers import Server, free_port, run, unmount_below, wait_for

SERVICE_ADDRESS = '10.96.0.1'  # of the service "kubernetes"


class Certificates:
    """An authority, and the certificates of the API server and of the node's kubelet."""

    def __init__(self, directory):
        self.directory, self.authority = directory, directory / 'ca.crt'
        directory.mkdir(exist_ok=True)
        run('openssl', 'req', '-x509', '-newkey', 'rsa:2048', '-nodes', '-days', '2', '-subj', '/CN=suite', '-keyout', directory / 'ca.key',
            '-out', self.authority)
        self.issue('server', '/CN=kube-apiserver', f'subjectAltName=IP:127.0.0.1,IP:{SERVICE_ADDRESS},DNS:kubernetes.default.svc')
        self.issue('node', '/O=system:nodes/CN=system:node:node', 'extendedKeyUsage=clientAuth')

    def issue(self, name, subject, extension):
        key, request, extensions = (self.directory / f'{name}.{kind}' for kind in ('key', 'csr', 'ext'))
        extensions.write_text(extension)
        run('openssl', 'req', '-newkey', 'rsa:2048', '-nodes', '-subj', subject, '-keyout', key, '-out', request)
        run('openssl', 'x509', '-req', '-in', request, '-CA', self.authority, '-CAkey', self.directory / 'ca.key', '-CAcreateserial', '-days', '2',
            '-extfile', extensions, '-out', self.directory / f'{name}.crt')
        (self.directory / f'{name}.pem').write_text((self.directory / f'{name}.crt').read_text() + key.read_text())


class Cluster:
    """etcd, kube-apiserver and one kubelet that uses larder for its images."""

    TOKEN = 'suite-token'  # of an administrator

    def __init__(self, suite, runtime, images, authorizers='AlwaysAllow', kubelet_flags=(), server=None, pki=None, **kubelet):  # and fields of KubeletConfiguration
        """The API server is at `server`, a host and a port. In `pki`, kubelet has its certificate under the name that kubeadm gives it."""
        self.work, (self.host, self.port) = suite.work, server or ('127.0.0.1', free_port())
        etcd, peer = free_port(), free_port()
        self.servers = [Server(suite.work, 'etcd', 'etcd', '--data-dir', suite.work / 'etcd-data', '--listen-client-urls',
                               f'http://127.0.0.1:{etcd}', '--advertise-client-urls', f'http://127.0.0.1:{etcd}',
                               '--listen-peer-urls', f'http://127.0.0.1:{peer}')]
        self.certificates = Certificates(suite.work / 'certificates')
        key, tokens = suite.work / 'accounts.key', suite.work / 'tokens.csv'
        run('openssl', 'genrsa', '-out', key, '2048')
        tokens.write_text(f'{self.TOKEN},suite,suite,"system:masters"\n')
        certificates = self.certificates.directory
        self.servers.append(Server(
            suite.work, 'kube-apiserver', suite.peers / 'kube-apiserver', f'--etcd-servers=http://127.0.0.1:{etcd}',
            f'--secure-port={self.port}', f'--bind-address={self.host}', f'--cert-dir={suite.work}/apiserver', f'--token-auth-file={tokens}',
            f'--client-ca-file={self.certificates.authority}', f'--tls-cert-file={certificates}/server.crt',
            f'--tls-private-key-file={certificates}/server.key', f'--service-account-key-file={key}',
            f'--service-account-signing-key-file={key}', f'--authorization-mode={authorizers}',
            '--service-account-issuer=https://suite.invalid', '--enable-admission-plugins=NodeRestriction',
            '--service-cluster-ip-range=10.96.0.0/24', '--kubelet-preferred-address-types=InternalIP'))
        wait_for('kube-apiserver', lambda: self.call('GET', '/readyz', raw=True))
        # What the controller manager does.
        wait_for('the namespace "default"', lambda: self.call('GET', '/api/v1/namespaces/default'))
        self.call('POST', '/api/v1/namespaces/default/serviceaccounts', {'metadata': {'name': 'default'}})
        self.manifests = suite.work / 'manifests'
        self.manifests.mkdir()
        pki = pki or suite.work / 'pki'
        pki.mkdir(exist_ok=True)
        certificate = pki / 'kubelet-client-current.pem'
        certificate.write_bytes((certificates / 'node.pem').read_bytes())
        kubeconfig = self.write_kubeconfig('kubeconfig', {'client-certificate': str(certificate), 'client-key': str(certificate)})
        self.administrator = self.write_kubeconfig('administrator', {'token': self.TOKEN})
        config = suite.work / 'kubelet.json'
        config.write_text(json.dumps({
            'apiVersion': 'kubelet.config.k8s.io/v1beta1', 'kind': 'KubeletConfiguration', 'failCgroupV1': False, 'failSwapOn': False,
            'cgroupDriver': 'cgroupfs', 'cgroupsPerQOS': False, 'enforceNodeAllocatable': [], 'address': '127.0.0.1', 'port': free_port(),
            'healthzPort': 0, 'authentication': {'anonymous': {'enabled': False}, 'webhook': {'enabled': False}},
            'authorization': {'mode': 'AlwaysAllow'}, 'containerRuntimeEndpoint': f'unix://{runtime}', 'imageServiceEndpoint': f'unix://{images}',
            'staticPodPath': str(self.manifests), 'podLogsDir': str(suite.work / 'pods'), 'resolvConf': '', 'syncFrequency': '5s',
            'fileCheckFrequency': '1s', 'evictionHard': {'memory.available': '10Mi', 'nodefs.available': '1%', 'imagefs.available': '1%',
                                                         'nodefs.inodesFree': '1%', 'imagefs.inodesFree': '1%'},
            'imageGCHighThresholdPercent': 100, 'serializeImagePulls': False, **kubelet}))
        self.servers.append(Server(suite.work, 'kubelet', suite.peers / 'kubelet', f'--config={config}', f'--kubeconfig={kubeconfig}',
                                   f'--root-dir={suite.work}/kubelet', f'--cert-dir={suite.work}/kubelet-certs',
                                   '--hostname-override=node', '--v=2', *kubelet_flags))
        wait_for('kubelet', lambda: self.call('GET', '/api/v1/nodes/node'))

    def write_kubeconfig(self, name, user):
        authority = base64.b64encode(self.certificates.authority.read_bytes()).decode()
        path = self.work / name
        path.write_text(json.dumps({
            'apiVersion': 'v1', 'kind': 'Config', 'current-context': 'suite',
            'clusters': [{'name': 'suite', 'cluster': {'server': f'https://{self.host}:{self.port}', 'certificate-authority-data': authority}}],
            'users': [{'name': 'suite', 'user': user}], 'contexts': [{'name': 'suite', 'context': {'cluster': 'suite', 'user': 'suite'}}]}))
        return path

    def call(self, method, path, body=None, raw=False):
        context = ssl.create_default_context(cafile=self.certificates.authority)
        request = urllib.request.Request(f'https://{self.host}:{self.port}{path}', body and json.dumps(body).encode(), method=method,
                                         headers={'Authorization': f'Bearer {self.TOKEN}', 'Content-Type': 'application/json'})
        with urllib.request.urlopen(request, context=context) as answer:
            return answer.read() if raw else json.load(answer)

    def create(self, name, image, policy, secret=None):
        self.call('POST', '/api/v1/namespaces/default/pods', pod(name, image, policy, secret))

    def create_static(self, name, image, policy):
        (self.manifests / f'{name}.yaml').write_text(json.dumps(pod(name, image, policy)))

    def create_secret(self, name, host, user, password):
        auth = base64.b64encode(f'{user}:{password}'.encode()).decode()
        content = json.dumps({'auths': {host: {'auth': auth}}})
        self.call('POST', '/api/v1/namespaces/default/secrets', {
            'metadata': {'name': name}, 'type': 'kubernetes.io/dockerconfigjson',
            'data': {'.dockerconfigjson': base64.b64encode(content.encode()).decode()}})

    def allow_node_tokens(self, audience):
        """Nodes may request tokens for an audience only if a rule names it."""
        roles = '/apis/rbac.authorization.k8s.io/v1'
        self.call('POST', f'{roles}/clusterroles', {'metadata': {'name': 'suite-audience'}, 'rules': [
            {'apiGroups': [''], 'resources': [audience], 'verbs': ['request-serviceaccounts-token-audience']}]})
        self.call('POST', f'{roles}/clusterrolebindings', {
            'metadata': {'name': 'suite-audience'}, 'subjects': [{'kind': 'Group', 'apiGroup': 'rbac.authorization.k8s.io', 'name': 'system:nodes'}],
            'roleRef': {'apiGroup': 'rbac.authorization.k8s.io', 'kind': 'ClusterRole', 'name': 'suite-audience'}})

    def delete(self, name):
        self.call('DELETE', f'/api/v1/namespaces/default/pods/{name}?gracePeriodSeconds=0')

    def state(self, name):
        """`Running`, or the reason why the container waits."""
        status = self.call('GET', f'/api/v1/namespaces/default/pods/{name}')['status']
        state = status['containerStatuses'][0]['state']
        return 'Running' if 'running' in state else state.get('waiting', state.get('terminated', {})).get('reason')

    def wait_state(self, name, *states, seconds=90):
        return wait_for(f'{name}: {" or ".join(states)}', lambda: (state := self.state(name)) in states and state, seconds)

    def stop(self):
        for server in reversed(self.servers):
            server.stop(seconds=10)
        unmount_below(self.work / 'kubelet')
        for name in ('manifests', 'etcd-data', 'apiserver', 'certificates', 'kubelet', 'kubelet-certs', 'pods'):
            shutil.rmtree(self.work / name, ignore_errors=True)


def pod(name, image, policy, secret=None):
    spec = {'hostNetwork': True, 'nodeName': 'node', 'automountServiceAccountToken': False, 'terminationGracePeriodSeconds': 0,
            'enableServiceLinks': False, 'tolerations': [{'operator': 'Exists'}],
            'containers': [{'name': 'main', 'image': image, 'imagePullPolicy': policy}]}
    if secret:
        spec['imagePullSecrets'] = [{'name': secret}]
    return {'apiVersion': 'v1', 'kind': 'Pod', 'metadata': {'name': name, 'namespace': 'default'}, 'spec': spec}


def container(name, image, *command):
    more = {'command': list(command)} if command else {}
    return {'name': name, 'image': image, 'imagePullPolicy': 'IfNotPresent', **more}
