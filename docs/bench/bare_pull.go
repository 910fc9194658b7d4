// Pulls one image over CRI with grpc-go and does nothing else: no flags, no configuration, no generated messages.
//
// A stand-in for crictl where crictl is not at hand. crictl links the same gRPC library and, beyond it, a command-line
// framework, the generated CRI messages and client libraries of Kubernetes, so it costs at least as much as this.
//
//	apt-get install -y golang-go golang-google-grpc-dev
//	GO111MODULE=off GOPATH=/usr/share/gocode go build -ldflags='-s -w' -o bare_pull docs/bench/bare_pull.go
//	./bare_pull SOCKET IMAGE
package main

import (
	"context"
	"fmt"
	"net"
	"os"

	"google.golang.org/grpc"
)

// message is an encoded protobuf message.
type message []byte

// raw passes messages on as they are.
type raw struct{}

func (raw) Marshal(v interface{}) ([]byte, error) { return *v.(*message), nil }

func (raw) Unmarshal(data []byte, v interface{}) error {
	*v.(*message) = append(message(nil), data...)
	return nil
}

func (raw) Name() string { return "proto" }

// field1 encodes a message whose only field is number 1, of fewer than 128 bytes.
func field1(content []byte) []byte {
	return append([]byte{1<<3 | 2, byte(len(content))}, content...)
}

func main() {
	if len(os.Args) != 3 || len(os.Args[2]) > 120 {
		fmt.Fprintln(os.Stderr, "usage: bare_pull SOCKET IMAGE")
		os.Exit(2)
	}
	dial := func(ctx context.Context, path string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}
	conn, err := grpc.Dial(os.Args[1], grpc.WithInsecure(), grpc.WithContextDialer(dial), grpc.WithAuthority("localhost"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	// PullImageRequest{image: ImageSpec{image: NAME}}
	request := message(field1(field1([]byte(os.Args[2]))))
	var reply message
	err = conn.Invoke(context.Background(), "/runtime.v1.ImageService/PullImage", &request, &reply, grpc.ForceCodec(raw{}))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Printf("%s\n", reply[2:])
}
