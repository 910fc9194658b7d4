// containerd's own snapshotter suite against larder, through containerd's proxy client. scripts/snapshotter-suite puts this file
// into a work tree of containerd and runs it.

package proxy_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	_ "github.com/containerd/containerd/v2/pkg/testutil"
)

const settings = `apiVersion: larder.dev/v1alpha1
kind: LarderConfiguration
containerd:
  snapshotter: true
`

// Each case has a daemon and a store of its own.
func start(_ context.Context, root string) (snapshots.Snapshotter, func() error, error) {
	config, socket := filepath.Join(root, "config.yaml"), filepath.Join(root, "larder.sock")
	if err := os.WriteFile(config, []byte(settings), 0o600); err != nil {
		return nil, nil, err
	}
	log, err := os.Create(filepath.Join(root, "larder.log"))
	if err != nil {
		return nil, nil, err
	}
	larder := exec.Command(os.Getenv("LARDER"), "--root", filepath.Join(root, "store"), "serve", "--socket", socket)
	larder.Env = append(os.Environ(), "LARDER_CONFIG="+config)
	larder.Stdout, larder.Stderr = log, log
	if err := larder.Start(); err != nil {
		return nil, nil, err
	}
	stop := func() error {
		_ = larder.Process.Signal(syscall.SIGTERM)
		return larder.Wait()
	}
	for range 100 {
		if _, err = os.Stat(socket); err == nil {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if err != nil {
		_ = stop()
		return nil, nil, err
	}
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		_ = stop()
		return nil, nil, err
	}
	snapshotter := proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(connection), "larder")
	return snapshotter, func() error {
		_ = connection.Close()
		return stop()
	}, nil
}

// The suite omits one rename of a directory of a lower layer for snapshotters of this name: no overlay allows it without
// redirects, which larder switches off since a layer of a registry could contain them.
func TestLarder(t *testing.T) {
	testsuite.SnapshotterSuite(t, "overlayfs", start)
}
