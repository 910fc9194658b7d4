#!/bin/sh
# Writes a kubeconfig of larder's own identity, for kubernetes.kubeconfig on each node, with mode 0600:
#
#     sh kubeconfig.sh FILE
#
# If it fails, an existing FILE stays as it is.
# It needs kubectl with the rights to read the secret. The address of the API server is that of kubectl's kubeconfig.
set -eu
if [ $# != 1 ]; then
    echo "usage: sh kubeconfig.sh FILE" >&2
    exit 2
fi
cluster() {
    kubectl config view --raw --minify --flatten -o "jsonpath={.clusters[0].cluster.$1}"
}
server=$(cluster server)
authority=$(cluster certificate-authority-data)
case $server in
*//127.* | *//localhost* | *//\[::1\]*)
    echo "warning: $server: other nodes do not reach this address; replace it in $1" >&2
    ;;
esac
encoded=$(kubectl get secret larder-token -n larder-system -o 'jsonpath={.data.token}')
token=$(printf %s "$encoded" | base64 -d)
if [ -z "$token" ]; then
    echo "secret larder-system/larder-token has no token yet: the controller manager of the cluster adds it" >&2
    exit 1
fi
# Only its owner may read what mktemp makes.
new=$(mktemp "$1.XXXXXX")
trap 'rm -f "$new"' EXIT
cat > "$new" <<END
apiVersion: v1
kind: Config
clusters:
- name: cluster
  cluster:
    server: $server
    certificate-authority-data: $authority
users:
- name: larder
  user:
    token: $token
contexts:
- name: larder
  context: { cluster: cluster, user: larder }
current-context: larder
END
mv "$new" "$1"
